"""Compiles the storing of a step with Numba, which every vLLM brings along; without it NumPy does the same.

It takes a good second, when the scheduler has just been made, before the first request, and never later. Numba's cache
on disk is left alone: it would not notice that a table this code was compiled with has changed.

Only in a process that belongs to one engine core, or has Numba loaded already. vLLM 0.32 on the CPU looks through all
modules when it makes a worker, and stumbles over one of Numba's: a second engine in the process would not start.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

from engine_shim.allocation_map.map_observer import MapObserver
from engine_shim.switches import switch

log = logging.getLogger("kvatlas.shim")

SETTING = "KVATLAS_VLLM_COMPILED"
_CORE = "EngineCore"  # how vLLM calls such a process


def compile_store(observer: MapObserver, environment: Mapping[str, str]) -> str:
    """Let this observer store its steps in compiled code. "" or why not; never raises."""
    if not switch(environment, SETTING, default=True):
        return f"{SETTING}=0"
    if "llvmlite" not in sys.modules and not multiprocessing.current_process().name.startswith(_CORE):
        return "this process is not an engine core's own"
    began = time.monotonic()
    try:
        reason = observer.compile(_compiled)
    except Exception as error:  # noqa: BLE001 - a compiler is a large thing to trust, and vLLM must start
        reason = repr(error)
    if reason:
        log.info("steps are stored with NumPy, which takes more time: %s", reason)
    elif (took := time.monotonic() - began) > 1:
        log.info("the storing of steps was compiled in %.1f s", took)
    return reason


@cache
def _compiled(function: Any) -> Any:
    import numba

    return numba.njit(function)
