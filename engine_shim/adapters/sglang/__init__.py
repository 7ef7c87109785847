"""SGLang: publishes each slot pool that a radix cache works on, from hooks on the allocator and the tree.

`register` is the entry point of the group `sglang.srt.plugins`, and does nothing unless KVATLAS_SGLANG=1: it has been
run against SGLang's allocators and cache, not inside of its server, which needs a GPU.
"""

from __future__ import annotations

from engine_shim.adapters.sglang.plugin import attach, attachments, register, turn_off

__all__ = ["attach", "attachments", "register", "turn_off"]
