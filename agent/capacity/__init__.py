"""Capacity: what a model keeps in memory, what fits on given GPUs, and what to change where it does not."""
