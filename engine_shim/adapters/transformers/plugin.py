"""The one line that a program needs: from then on each paged attention cache that Transformers makes is watched.

It leaves two notes, on the constructor of the class that runs batches and where its manager is destroyed; everything
else hangs on the objects that were made. `generate_batch`, `init_continuous_batching` and `transformers serve` all do.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from engine_shim.adapters.opening import disabled, name_the_speaker
from engine_shim.adapters.transformers.attachment import Attachment
from engine_shim.adapters.transformers.shape import SUPPORTED, examine

log = logging.getLogger("kvatlas.shim")

_MARK = "__kvatlas__"
_attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()


def register() -> None:
    """Watch what Transformers makes from now on. Idempotent; never raises; KVATLAS_DISABLE=1 leaves no trace."""
    try:
        if disabled(os.environ):
            return
        name_the_speaker()
        from transformers.generation.continuous_batching import continuous_api

        processor_class, manager_class = (
            continuous_api.ContinuousBatchProcessor,
            continuous_api.ContinuousBatchingManager,
        )
        if not hasattr(processor_class.__init__, _MARK):
            processor_class.__init__ = _watching(processor_class.__init__)
            manager_class.destroy = _letting_go(manager_class.destroy)
            atexit.register(_close_maps)
    except Exception as error:  # noqa: BLE001 - the program must go on whatever befalls us
        _give_up(repr(error))


def attachments() -> tuple[Attachment, ...]:
    """The batch processors of this process that are watched now."""
    return tuple(one for one in _attachments if not one.reason)


def turn_off(reason: str = "turned off") -> int:
    """Stop watching every cache of this process at its next step; how many those are. From any thread."""
    watched = attachments()
    for one in watched:
        one.turn_off(reason)
    return len(watched)


def attach(processor: Any, environment: Mapping[str, str] = os.environ) -> Attachment | None:
    """Watch a batch processor that was just made; None, and one log line, where that cannot be. Never raises."""
    one: Attachment | None = None
    version = ""
    try:
        if disabled(environment):
            return None
        import transformers

        version = str(transformers.__version__)
        if problems := examine(processor):
            _give_up("; ".join(problems), version=version)
            return None
        one = Attachment(processor, version, environment)
        one.attach()
        if one.reason:  # no map: what opened it has said why
            return None
        _attachments.add(one)
    except Exception as error:  # noqa: BLE001 - Transformers must start whatever befalls us
        _give_up(repr(error), version=version)
        if one is not None:
            one.stop(repr(error))
        return None
    if not f"{version}.".startswith(f"{SUPPORTED}."):
        log.warning("Transformers %s is watched; what it does was tested with %s", version, SUPPORTED)
    log.info("publishing Transformers' paged cache to %s", ", ".join(str(seen.path) for seen in one.observers))
    return one


def _watching(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        attach(self)

    setattr(construct, _MARK, True)
    return construct


def _letting_go(stock: Callable[..., None]) -> Callable[..., None]:
    """A hook and the object that it is on hold each other, and wait for the garbage collector, which `stop` calls and
    `destroy` does not: without us the cache would be freed at once, so it must be with us."""

    @functools.wraps(stock)
    def destroy(self: Any) -> None:
        stock(self)
        for one in attachments():
            if one.watches(getattr(self, "batch_processor", None)):
                one.stop("its manager was destroyed")

    setattr(destroy, _MARK, True)
    return destroy


def _close_maps() -> None:
    """A program may end without having stopped what generates."""
    for one in attachments():
        one.stop("the process ended")


def _give_up(reason: str, *, version: str = "") -> None:
    log.warning(
        "Transformers%s is not watched, and goes on: %s (tested with Transformers %s)",
        f" {version}" if version else "", reason, SUPPORTED,
    )  # fmt: skip
