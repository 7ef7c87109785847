"""What engines say of themselves over HTTP: fetched, brought to one set of quantities, and held against the maps."""
