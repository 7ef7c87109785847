"""What changes vLLM is off unless its operator asks for it."""

from __future__ import annotations

import pytest

from engine_shim.adapters.vllm.allocation import Allocation, allocation_setting
from engine_shim.adapters.vllm.compaction import compaction_asked


def test_vllm_is_not_changed_unless_its_environment_says_so() -> None:
    others = {"KVATLAS_DIR": "/run/kvatlas", "KVATLAS_COMPACTION": "all"}
    for environment in ({}, others, others | {"KVATLAS_VLLM_ALLOCATION": "", "KVATLAS_VLLM_COMPACTION": "0"}):
        assert allocation_setting(environment) is Allocation.STOCK
        assert not compaction_asked(environment)


@pytest.mark.parametrize("allocation", ["relocating", "auto"])
def test_it_is_changed_where_its_environment_says_so(allocation: str) -> None:
    assert allocation_setting({"KVATLAS_VLLM_ALLOCATION": allocation}) is Allocation(allocation)
    assert compaction_asked({"KVATLAS_VLLM_COMPACTION": "1"})
