"""The allocation map: how one block pool is published in a mapped file, and read by others while it changes."""
