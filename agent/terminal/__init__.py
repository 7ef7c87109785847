"""What `kvatlas top` shows in a terminal: read through the API's client, laid out without I/O, and kept up to date."""
