"""A small real KV connector: it keeps the blocks of each finished request for some steps, as one that sends them does.

Its worker half is told of a finished request through the step's metadata, and reports the sending as done some steps
later; only then does vLLM free the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

HOLD_STEPS = 6


@dataclass
class Sending(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """Requests that finished since the last step."""

    started: list[str] = field(default_factory=list)


class HoldingConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Both halves; each process uses one."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._started: list[str] = []
        self._remaining: dict[str, int] = {}

    # scheduler half
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        started, self._started = self._started, []
        return Sending(started)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._started.append(request.request_id)
        return bool(block_ids), None

    # worker half
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        metadata = self._get_connector_metadata()
        if isinstance(metadata, Sending):
            self._remaining.update(dict.fromkeys(metadata.started, HOLD_STEPS))
        done = {name for name, left in self._remaining.items() if left == 0}
        self._remaining = {name: left - 1 for name, left in self._remaining.items() if left}
        return done or None, None


class PassingConnector(HoldingConnector):
    """Keeps nothing: vLLM frees each request's blocks as soon as no step in flight may write to them."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None
