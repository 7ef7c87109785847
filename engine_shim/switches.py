"""Settings that are on or off, read from the environment in one way by everything of the shim."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache

log = logging.getLogger("kvatlas.shim")

TRUE_WORDS = ("1", "true", "t", "yes", "y", "on")  # as the commands of the agent take them
FALSE_WORDS = ("0", "false", "f", "no", "n", "off")


def switch(
    environment: Mapping[str, str], name: str, *, default: bool = False, not_understood: bool | None = None
) -> bool:
    """Is it on? `default` where nothing is said.

    What is not understood counts as `not_understood`, the default without it, and one log line of the process says so.
    """
    text = environment.get(name, "").strip()
    word = text.lower()
    if not word:
        return default
    if word in TRUE_WORDS or word in FALSE_WORDS:
        return word in TRUE_WORDS
    taken = default if not_understood is None else not_understood
    _say_what_it_counts_as(name, text, taken)
    return taken


def hash_request_ids(environment: Mapping[str, str]) -> bool:
    """KVATLAS_HASH_REQUEST_IDS. Whoever sets it does not want ids in the clear, whatever word they chose for it."""
    return switch(environment, "KVATLAS_HASH_REQUEST_IDS", not_understood=True)


@cache  # a process asks again for each pool, cache and allocation
def _say_what_it_counts_as(name: str, text: str, on: bool) -> None:
    log.warning("%s=%r is not understood, and counts as %s; set 1 or 0", name, text, "on" if on else "off")
