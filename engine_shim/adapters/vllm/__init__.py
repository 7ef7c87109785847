"""vLLM: publishes the block pool of each engine core, from hooks on vLLM's own objects.

`register` is the entry point of the group `vllm.general_plugins`; nothing here imports vLLM before vLLM calls it.
"""

from __future__ import annotations

from engine_shim.adapters.vllm.plugin import attachments, register, turn_off

__all__ = ["attachments", "register", "turn_off"]
