"""What torch's caching allocator holds: snapshots read safely, free memory by pool, and what would change it."""
