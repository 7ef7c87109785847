"""Brings slot numbers from wherever SGLang keeps them to NumPy, without waiting for a device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ready = Callable[[], bool]
Copier = Callable[[Any, bool], tuple[Any, Ready]]
"""A tensor of slots, and whether it may be kept as it is, to one on the host, which may be read once the second part of
the result says so."""


def copy_out(slots: Any, keeps: bool) -> tuple[Any, Ready]:
    """On the CPU a copy unless the tensor may be kept; from a device one that is under way, in order with its work."""
    if slots.is_cpu:
        return (slots if keeps else slots.clone()), _now
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


def as_one(hosts: Sequence[Any]) -> NDArray[np.int64]:
    """Tensors on the host, one after another, as NumPy, (n,). At least one."""
    if len(hosts) == 1:
        return as_numbers(hosts[0])
    torch: Any = sys.modules["torch"]
    if any(host.dim() != 1 for host in hosts):
        hosts = [host.reshape(-1) for host in hosts]
    return as_numbers(torch.cat(list(hosts)))


def _now() -> bool:
    return True
