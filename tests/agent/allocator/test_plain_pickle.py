"""Pickles from strangers: plain values as pickle itself reads them, and everything else refused by name."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.allocator.errors import SnapshotError
from agent.allocator.plain_pickle import PickleLimits, load
from agent.allocator.skipping import Skipped

SKIP = ("frames", "device_traces")

keys = st.sampled_from(["size", "frames", "device_traces", "blocks", "a" * 60]) | st.text(max_size=5)
atoms = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.sampled_from(["size", "blocks", "a" * 60])  # not the names of SKIP: those are told by standing before a value
    | st.text(min_size=200, max_size=400)
)
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(keys, inner, max_size=6) | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=40,
)


def without(value: Any) -> Any:
    """The value with what is to be passed over left out, as a model of what the machine should give."""
    if isinstance(value, dict):
        return {
            key: "skipped" if key in SKIP and isinstance(one, list | dict | tuple) else without(one)
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(without(one) for one in value)
    return value


def flat(value: Any) -> Any:
    """What the machine gave, in the same terms."""
    if isinstance(value, Skipped):
        return "skipped"
    if isinstance(value, dict):
        return {key: flat(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(flat(one) for one in value)
    return value


@given(value=values, protocol=st.integers(0, 5))
def test_plain_values_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    assert load(io.BytesIO(pickle.dumps(value, protocol))) == value


@given(value=st.binary(max_size=300), protocol=st.integers(3, 5))
def test_bytes_are_read_where_they_are_plain(value: bytes, protocol: int) -> None:
    assert load(io.BytesIO(pickle.dumps([value, value], protocol))) == [value, value]
    with pytest.raises(SnapshotError, match=r"_codecs\.encode|__builtin__\.bytes"):
        load(io.BytesIO(pickle.dumps(value, 2)))  # made by a call, in the older ones


@given(value=values, protocol=st.integers(2, 5))
def test_parts_that_are_passed_over_leave_the_rest_as_it_is(value: Any, protocol: int) -> None:
    """Texts and lists that stand in both are shared by way of the memo; what was passed over must not shift it."""
    shared = {"segments": value, "device_traces": [value, {"frames": value}], "after": ["size", "blocks", "frames"]}
    found = load(io.BytesIO(pickle.dumps(shared, protocol)), skip=SKIP)
    assert flat(found["segments"]) == without(value)
    assert found["after"] == ["size", "blocks", "frames"]
    assert isinstance(found["device_traces"], Skipped)


def test_texts_first_met_in_a_part_that_is_passed_over() -> None:
    names = ["".join(("siz", "e")), "".join(("fil", "ename"))]
    value = {"device_traces": [[{names[0]: 1, names[1]: 2}]], "segments": [{names[0]: 3, names[1]: 4}]}
    for protocol in range(6):
        found = load(io.BytesIO(pickle.dumps(value, protocol)), skip=SKIP)
        assert found["segments"] == [{"size": 3, "filename": 4}], protocol


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("traces", "recorded"),
    [
        ([], False),
        ([[], []], False),
        ([[{"action": "alloc"}]], True),
        ([[], [{"action": "alloc", "size": 1}] * 3], True),
    ],
)
def test_whether_anything_was_in_what_was_passed_over(traces: list[Any], recorded: bool, protocol: int) -> None:
    found = load(io.BytesIO(pickle.dumps({"device_traces": traces}, protocol)), skip=SKIP)
    assert found["device_traces"].entries is recorded


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/pwned",)


EVIL = {
    "reduce": (pickle.dumps(Evil(), 2), "posix.system"),
    "stack global": (pickle.dumps(Evil(), 4), "posix.system"),
    "class": (pickle.dumps(Path("/")), "pathlib"),
    "ordered": (pickle.dumps(OrderedDict(a=1), 2), "collections.OrderedDict"),
    "persistent": (b"\x80\x02X\x01\x00\x00\x00aQ.", "BINPERSID"),
    "extension": (b"\x80\x02\x82\x01.", "EXT1"),
    "instance": (b"(S'x'\nios\nsystem\n.", "STRING"),
    "instance of a name": (b"(ios\nsystem\n.", r"os\.system"),
    "build": (b"\x80\x02}}b.", "BUILD"),
    "new object": (b"\x80\x02))\x81.", "NEWOBJ"),
    "set": (pickle.dumps({1, 2}, 4), "EMPTY_SET"),
    "frozen set": (pickle.dumps(frozenset((1, 2)), 4), "FROZENSET"),
    "byte array": (pickle.dumps(bytearray(b"x"), 5), "BYTEARRAY8"),
    "buffer": (b"\x80\x05\x97.", "NEXT_BUFFER"),
    "inside what is passed over": (pickle.dumps({"frames": [[1, Evil()]]}, 4), "STACK_GLOBAL"),
    "inside, in the old way": (pickle.dumps({"frames": [{"a": Evil()}]}, 2), "posix.system"),
}


@pytest.mark.parametrize("name", EVIL)
def test_anything_but_plain_values_is_refused_by_name(name: str) -> None:
    data, text = EVIL[name]
    with pytest.raises(SnapshotError, match=text) as caught:
        load(io.BytesIO(data), skip=SKIP)
    assert str(caught.value).startswith("refused: ")
    assert "at byte" in str(caught.value)


@pytest.mark.parametrize("opcode", pickletools.opcodes, ids=lambda one: one.name)
def test_every_opcode_that_pickle_knows_is_read_or_refused(opcode: Any) -> None:
    """Whatever stands behind it, also in a part that is passed over: an error of ours, never another."""
    for before in (b"\x80\x04", b"\x80\x04}(X\x06\x00\x00\x00frames]((", b"\x80\x04]K\x01K\x02K\x03"):
        for after in (b"", b".", b"\x00" * 300 + b".", b"\n.\n.", b"\xff" * 20):
            with suppress(SnapshotError):
                load(io.BytesIO(before + opcode.code.encode("latin-1") + after), skip=SKIP)


@given(data=st.binary(max_size=200), protocol=st.sampled_from([b"", b"\x80\x02", b"\x80\x04"]))
def test_any_bytes_are_read_or_refused(data: bytes, protocol: bytes) -> None:
    with suppress(SnapshotError):
        load(io.BytesIO(protocol + data), skip=SKIP)


@given(value=values, at=st.floats(0, 1), protocol=st.integers(2, 5))
def test_a_pickle_that_is_cut_short_is_told_from_a_whole_one(value: Any, at: float, protocol: int) -> None:
    whole = pickle.dumps({"frames": [value], "segments": value}, protocol)
    with pytest.raises(SnapshotError):
        load(io.BytesIO(whole[: int(at * (len(whole) - 1))]), skip=SKIP)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x80\x04" + b"]" + b"K\x01a" * 200 + b".", "values"),
        (b"\x80\x04)" + b"\x85" * 200 + b".", "values"),
        (b"\x80\x04](" + b"K\x01" * 60 + b"l(" + b"K\x01" * 60 + b"l.", "values"),
        (b"\x80\x04](" + b"K\x01" * 60 + b"t(" + b"K\x01" * 60 + b"t.", "values"),
        (b"\x80\x04]" + b"X\xe8\x03\x00\x00" + b"a" * 1000 + (b"C\xc8" + b"a" * 200) * 20 + b".", "bytes of text"),
        (b"\x80\x04]" + (b"V" + b"a" * 900 + b"\n") * 6 + b".", "bytes of text"),
        (b"\x80\x04" + b"]" * 300 + b".", "at once"),
        (b"\x80\x04" + b"(" * 40 + b".", "deep"),
        (b"\x80\x04}X\x06\x00\x00\x00frames" + b"(" * 40 + b".", "deep"),
        (b"\x80\x04]" + b"".join(b"r" + struct.pack("<I", place) for place in range(400)) + b".", "refer"),
        (b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1) + b"\x01.", "number of 2,147,483,647 bytes"),
        (b"\x80\x04}K\x01K\x02s.", "key of type int"),
        (b"\x80\x04]\x94q\x00.", "mixes"),
        (b"\x80\x09.", "protocol 9"),
        (b"\x80\x04X" + struct.pack("<I", 2**32 - 1) + b"a.", "cut short"),
        (b"\x80\x05\x8e" + struct.pack("<Q", 2**64 - 1) + b"a.", "cut short"),
    ],
)
def test_what_is_beyond_the_limits_is_refused(data: bytes, text: str) -> None:
    limits = PickleLimits(values=100, waiting=200, depth=32, text_bytes=1000, all_text_bytes=4000, memo=300)
    with pytest.raises(SnapshotError, match=text):
        load(io.BytesIO(data), skip=SKIP, limits=limits)


def test_a_memo_place_of_the_files_choosing_sets_nothing_aside() -> None:
    assert load(io.BytesIO(b"\x80\x02]r\xff\xff\xff\x7f.")) == []


def test_a_long_text_is_passed_over() -> None:
    value = ["a" * 2_000_000, "b"]
    found = load(io.BytesIO(pickle.dumps(value)))
    assert isinstance(found[0], Skipped)
    assert found[1] == "b"
