"""Transformers' continuous batching: publishes each paged cache, sectors and blocks, from hooks on its objects.

`register` is the one line that a program needs; nothing here imports Transformers before that.
`python -m engine_shim.adapters.transformers PROGRAM ...` runs a program that cannot be changed.
"""

from __future__ import annotations

from engine_shim.adapters.transformers.plugin import attachments, register, turn_off

__all__ = ["attachments", "register", "turn_off"]
