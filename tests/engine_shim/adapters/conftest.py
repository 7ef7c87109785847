"""What the adapters' tests share: vLLM's attachment on stand-ins for vLLM's objects."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import pytest

from engine_shim.adapters.vllm import plugin
from engine_shim.adapters.vllm.attachment import Attachment
from tests.engine_shim.adapters.vllm_stand_ins import Scheduler

VLLM: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0"},
    "vllm.v1": {},
    "vllm.v1.core": {},
    "vllm.v1.core.kv_cache_utils": {"KVCacheBlockCopy": tuple},
    "vllm.v1.core.sched": {},
    "vllm.v1.core.sched.output": {
        "SchedulerOutput": SimpleNamespace(__dataclass_fields__={"kv_cache_block_copies": None})
    },
    "vllm.v1.engine": {"EngineCoreRequestType": SimpleNamespace(WAKEUP=b"\x05")},
    "vllm.v1.kv_cache_interface": {"get_kv_cache_spec_kind": lambda spec: SimpleNamespace(value=spec.kind)},
}


class WatchVllm(Protocol):
    """Watches a scheduler as the plugin does, with these settings."""

    def __call__(self, scheduler: Scheduler, **settings: str) -> Attachment: ...


@pytest.fixture
def vllm_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The few things that the adapter imports from vLLM."""
    for name, contents in VLLM.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def watch_vllm(vllm_modules: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchVllm]:
    """Maps lie in `tmp_path`; what is still watched at the test's end is stopped."""
    monkeypatch.setenv("KVATLAS_DIR", str(tmp_path))

    def watch(scheduler: Scheduler, **settings: str) -> Attachment:
        one = plugin.attach(scheduler, {"KVATLAS_ENGINE_ID": "test", **settings})
        assert one is not None
        return one

    yield watch
    for one in plugin.attachments():
        one.stop("the test is over")
