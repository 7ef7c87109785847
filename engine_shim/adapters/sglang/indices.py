"""Brings slot numbers from wherever SGLang keeps them to NumPy, without waiting for a device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ready = Callable[[], bool]
Copier = Callable[[Any], tuple[Any, Ready]]
"""A tensor of slots to one on the host, which may be read once the second part of the result says so."""


def copy_out(slots: Any) -> tuple[Any, Ready]:
    """From a CUDA device a copy that is under way, in order with the device's work."""
    torch: Any = sys.modules["torch"]  # the tensor's own library; nothing here may import it
    host = torch.empty(slots.shape, dtype=slots.dtype, pin_memory=True)
    host.copy_(slots, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event.query


def as_numbers(host: Any) -> NDArray[np.int64]:
    """A tensor on the host as NumPy, (n,)."""
    numbers: NDArray[np.int64] = host.reshape(-1).numpy().astype(np.int64, copy=False)
    return numbers
