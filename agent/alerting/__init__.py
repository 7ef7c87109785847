"""Feeds alerts with named numbers of the pools and of the agent itself, and says what became of them."""
