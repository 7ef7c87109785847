"""Settings that are on or off: the same words everywhere, and a word that is none of them is told of."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import engine_shim
from engine_shim import switches
from engine_shim.adapters.opening import disabled
from engine_shim.adapters.vllm.compaction import compaction_asked
from engine_shim.switches import hash_request_ids, switch

Environment = Mapping[str, str]
READ = {
    "KVATLAS_DISABLE": disabled,
    "KVATLAS_HASH_REQUEST_IDS": hash_request_ids,
    "KVATLAS_VLLM_COMPACTION": compaction_asked,
    "KVATLAS_SGLANG": lambda environment: switch(environment, "KVATLAS_SGLANG"),
}
ON = ["1", "true", "TRUE", "True", "yes", "on", "y", "t", " 1 ", "on\n"]
OFF = ["", " ", "0", "false", "False", "no", "off", "n", "f"]


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> Iterator[None]:
    switches._say_what_it_counts_as.cache_clear()
    yield
    switches._say_what_it_counts_as.cache_clear()


@pytest.mark.parametrize("name", READ)
def test_every_switch_takes_the_same_words(name: str, caplog: pytest.LogCaptureFixture) -> None:
    read: Callable[[Environment], bool] = READ[name]
    assert not read({})
    assert [word for word in ON if not read({name: word})] == []
    assert [word for word in OFF if read({name: word})] == []
    assert caplog.messages == []


def test_one_that_is_on_by_itself_stays_so_where_nothing_is_said() -> None:
    assert switch({}, "KVATLAS_VLLM_COMPILED", default=True)
    assert switch({"KVATLAS_VLLM_COMPILED": ""}, "KVATLAS_VLLM_COMPILED", default=True)
    assert not switch({"KVATLAS_VLLM_COMPILED": "no"}, "KVATLAS_VLLM_COMPILED", default=True)


@pytest.mark.parametrize("word", ["enabled", "sha256", "2", "tru"])
def test_a_word_that_nobody_knows_hashes_request_ids_and_switches_nothing_else(
    word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An id in the clear cannot be taken back."""
    caplog.set_level(logging.WARNING, "kvatlas.shim")
    for _ in range(3):  # a process asks for each of its pools
        assert hash_request_ids({"KVATLAS_HASH_REQUEST_IDS": word})
        assert not disabled({"KVATLAS_DISABLE": word})
        assert switch({"KVATLAS_VLLM_COMPILED": word}, "KVATLAS_VLLM_COMPILED", default=True)
    assert caplog.messages == [
        f"KVATLAS_HASH_REQUEST_IDS={word!r} is not understood, and counts as on; set 1 or 0",
        f"KVATLAS_DISABLE={word!r} is not understood, and counts as off; set 1 or 0",
        f"KVATLAS_VLLM_COMPILED={word!r} is not understood, and counts as on; set 1 or 0",
    ]


def test_nothing_of_the_shim_reads_a_switch_by_itself() -> None:
    own = re.compile(r"environ\w*\.get\(.*(==|!=|\bin\b) *[\"'(A-Z]|environ\w*\[.*\] *(==|!=)")
    package = Path(engine_shim.__file__).parent
    found = [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if own.search(line)
    ]
    assert found == []
