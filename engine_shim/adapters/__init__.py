"""Translate engines that are not ours into the shim's terms; each imports its engine only when asked to attach."""
