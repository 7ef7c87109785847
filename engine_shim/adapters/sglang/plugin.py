"""The entry point that SGLang calls in each of its processes, which does nothing unless the operator asked for it."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from engine_shim.adapters.opening import disabled, name_the_speaker
from engine_shim.adapters.sglang.attachment import Attachment
from engine_shim.adapters.sglang.indices import Copier
from engine_shim.adapters.sglang.shape import SUPPORTED, examine
from engine_shim.adapters.sglang.steps import MARK, watch_steps
from engine_shim.switches import switch

log = logging.getLogger("kvatlas.shim")

SWITCH = "KVATLAS_SGLANG"

_attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()


def register() -> None:
    """Watch each radix cache that is made from now on, with KVATLAS_SGLANG=1. Idempotent; never raises."""
    try:
        if not switch(os.environ, SWITCH) or disabled(os.environ):
            return
        name_the_speaker()
        from sglang.srt.mem_cache.radix_cache import RadixCache

        if not hasattr(RadixCache.__init__, MARK):
            RadixCache.__init__ = _watching(RadixCache.__init__)
            atexit.register(_close_maps)
    except Exception as error:  # noqa: BLE001 - the server must start whatever befalls us
        _give_up(repr(error))


def attachments() -> tuple[Attachment, ...]:
    """The radix caches of this process that are watched now."""
    return tuple(one for one in _attachments if not one.reason)


def turn_off(reason: str = "turned off") -> int:
    """Stop watching every cache of this process at its next step; how many those are. From any thread."""
    watched = attachments()
    for one in watched:
        one.turn_off(reason)
    return len(watched)


def attach(
    tree: Any, environment: Mapping[str, str] = os.environ, *, copier: Copier | None = None
) -> Attachment | None:
    """Watch one radix cache; None, and one log line, where that cannot be. Never raises."""
    one: Attachment | None = None
    try:
        if disabled(environment) or getattr(tree, "disable", False):
            return None
        version = _version()
        if problems := examine(tree):
            _give_up("; ".join(problems), version=version)
            return None
        one = Attachment(tree, version, environment, copier)
        one.attach()
        if one.reason:  # no map: what opened it has said why
            return None
        _attachments.add(one)
        watch_steps(attachments)
    except Exception as error:  # noqa: BLE001 - SGLang must start whatever befalls us
        _give_up(repr(error))
        if one is not None:
            one.stop(repr(error))
        return None
    if version != SUPPORTED:
        log.warning("SGLang %s is watched; what it does was tested with %s", version, SUPPORTED)
    return one


def _watching(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        attach(self)

    setattr(construct, MARK, True)
    return construct


def _close_maps() -> None:
    for one in attachments():
        one.stop("the process ended")


def _version() -> str:
    return str(getattr(sys.modules.get("sglang"), "__version__", "unknown"))


def _give_up(reason: str, *, version: str = "") -> None:
    log.warning(
        "SGLang%s is not watched, and goes on: %s (tested with SGLang %s)",
        f" {version}" if version else "", reason, SUPPORTED,
    )  # fmt: skip
