"""What the control socket's messages may be: every round trip, every malformation, and whatever else bytes can be."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_shim.control.messages import (
    ERROR_CODES,
    MAX_INTEGER,
    MAX_LINE_BYTES,
    SCHEMA,
    AllocatorReply,
    AllocatorRequest,
    CompactRequest,
    ControlReply,
    ControlRequest,
    ErrorReply,
    MovingRequest,
    PlanRequest,
    RelocationRequest,
    RunReply,
    StatusReply,
    StatusRequest,
    SwitchReply,
    TurnOffRequest,
    encode_reply,
    encode_request,
    parse_reply,
    parse_request,
)
from engine_shim.errors import ControlMalformed

shares = st.floats(0, 1)
counts = st.integers(0, MAX_INTEGER)
texts = st.text(max_size=40)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-MAX_INTEGER, MAX_INTEGER)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
details = st.dictionaries(texts, scalars | st.dictionaries(texts, scalars, max_size=3), max_size=5)
limits = st.none() | st.integers(1, MAX_INTEGER)
requests = st.one_of(
    st.just(StatusRequest()),
    st.builds(PlanRequest, target=shares, max_moves=st.none() | counts),
    st.builds(
        CompactRequest,
        target=shares,
        max_moves=st.none() | counts,
        max_chunk_moves=limits,
        max_chunk_bytes=limits,
        max_step_seconds=st.none() | st.floats(0, 1, exclude_min=True),
        verify=st.booleans(),
        max_seconds=st.floats(0, 600, exclude_min=True),
    ),
    st.builds(MovingRequest, on=st.booleans()),
    st.builds(RelocationRequest, on=st.booleans()),
    st.builds(TurnOffRequest, reason=texts),
    st.builds(AllocatorRequest, snapshot=st.booleans()),
)
runs = st.builds(
    RunReply,
    decision=texts,
    reason=texts,
    planned_moves=counts,
    moved_blocks=counts,
    moved_bytes=counts,
    fragmentation_rate_before=st.none() | shares,
    fragmentation_rate_after=st.none() | shares,
    largest_allocatable_run_before=st.none() | counts,
    largest_allocatable_run_after=st.none() | counts,
    details=details,
)
replies = st.one_of(
    runs,
    st.builds(SwitchReply, on=st.booleans(), reason=texts),
    st.builds(
        StatusReply,
        moving=st.booleans(),
        relocation=st.none() | st.booleans(),
        running=st.booleans(),
        policy=texts,
        reason=texts,
        last_report=st.none() | runs,
        details=details,
    ),
    st.builds(
        AllocatorReply,
        available=st.booleans(),
        reason=texts,
        backend=texts,
        devices=details,
        snapshot_file=texts,
        snapshot_bytes=counts,
    ),
    st.builds(ErrorReply, error=st.sampled_from(ERROR_CODES), message=texts, action=texts, field=texts),
)
values = st.recursive(
    scalars | st.floats(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)


def run_reply(**changes: Any) -> RunReply:
    given_values: dict[str, Any] = {
        "decision": "reached",
        "reason": "",
        "planned_moves": 4,
        "moved_blocks": 4,
        "moved_bytes": 4096,
        "fragmentation_rate_before": 0.5,
        "fragmentation_rate_after": None,
        "largest_allocatable_run_before": 5,
        "largest_allocatable_run_after": None,
    }
    return RunReply(**{**given_values, **changes})


def line(**message: Any) -> bytes:
    return json.dumps({"schema": SCHEMA, **message}).encode() + b"\n"


@given(requests)
@settings(max_examples=150)
def test_requests_come_back_as_they_were(request: ControlRequest) -> None:
    encoded = encode_request(request)
    assert encoded.endswith(b"\n")
    assert encoded.count(b"\n") == 1
    assert parse_request(encoded) == request


@given(replies)
@settings(max_examples=150)
def test_replies_come_back_as_they_were(reply: ControlReply) -> None:
    encoded = encode_reply(reply)
    assert encoded.count(b"\n") == 1
    assert parse_reply(encoded) == reply


def test_fields_with_a_default_may_be_left_out() -> None:
    assert parse_request(line(op="compact")) == CompactRequest()
    assert parse_request(line(op="plan", target=0)) == PlanRequest(target=0.0)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", ""),
        (b"\n", ""),
        (b"hello\n", ""),
        (b"[]\n", ""),
        (b"null\n", ""),
        (b'{"schema"\n', ""),
        (b"\xff\xfe\n", ""),
        (b"[" * 60_000, ""),
        (b'{"a":' * 12_000, ""),
        (b"1" * 60_000, ""),
        (b"{}", "schema"),
        (line(schema="kvatlas.control/v2", op="status"), "schema"),
        (line(schema=1, op="status"), "schema"),
        (line(), "op"),
        (line(op="explode"), "op"),
        (line(op="run"), "op"),
        (line(op=None), "op"),
        (line(op=["status"]), "op"),
        (line(op={}), "op"),
        (line(op="x" * 50_000), "op"),
        (line(op="status", verbose=True), "verbose"),
        (line(op="plan", max_seconds=1), "max_seconds"),
        (line(op="moving"), "on"),
        (line(op="moving", on=1), "on"),
        (line(op="moving", on="off"), "on"),
        (line(op="moving", on=None), "on"),
        (b'{"schema":"kvatlas.control/v1","op":"moving","on":true,"on":false}\n', "on"),
        (line(op="plan", target=True), "target"),
        (line(op="plan", target="0.1"), "target"),
        (line(op="plan", target=1.01), "target"),
        (line(op="plan", target=-0.1), "target"),
        (line(op="plan", target=None), "target"),
        (line(op="plan", target=10**400), "target"),
        (b'{"schema":"kvatlas.control/v1","op":"plan","target":1e999}\n', "target"),
        (b'{"schema":"kvatlas.control/v1","op":"plan","target":NaN}\n', ""),
        (b'{"schema":"kvatlas.control/v1","op":"plan","target":-Infinity}\n', ""),
        (line(op="plan", max_moves=-1), "max_moves"),
        (line(op="plan", max_moves=1.0), "max_moves"),
        (line(op="plan", max_moves=False), "max_moves"),
        (line(op="plan", max_moves=MAX_INTEGER + 1), "max_moves"),
        (line(op="plan", max_moves=10**4000), "max_moves"),
        (line(op="compact", max_chunk_moves=0), "max_chunk_moves"),
        (line(op="compact", max_chunk_bytes=0), "max_chunk_bytes"),
        (line(op="compact", max_step_seconds=0), "max_step_seconds"),
        (line(op="compact", max_step_seconds=1.5), "max_step_seconds"),
        (line(op="compact", max_seconds=601), "max_seconds"),
        (line(op="compact", max_seconds=None), "max_seconds"),
        (line(op="compact", verify=0), "verify"),
    ],
)
def test_a_malformed_request_names_the_field(data: bytes, field: str) -> None:
    with pytest.raises(ControlMalformed) as caught:
        parse_request(data)
    assert caught.value.field == field
    assert len(str(caught.value)) < 400
    assert caught.value.error == ("unsupported" if field == "schema" else "bad_request")


def test_a_message_of_more_than_a_line_is_too_large() -> None:
    fits = line(op="status").rstrip() + b" " * (MAX_LINE_BYTES - len(line(op="status")) + 1)
    assert parse_request(fits) == StatusRequest()
    with pytest.raises(ControlMalformed) as caught:
        parse_request(fits + b" ")
    assert caught.value.error == "too_large"


@pytest.mark.parametrize(
    ("reply", "field"),
    [
        (run_reply(fragmentation_rate_before=math.nan), "fragmentation_rate_before"),
        (run_reply(moved_blocks=2.5), "moved_blocks"),
        (run_reply(reason=None), "reason"),
        (run_reply(details={"seconds": math.inf}), "details"),
        (run_reply(details={"deep": {"deeper": {}}}), "details"),
        (run_reply(details={"moves": [1, 2]}), "details"),
        (run_reply(details={1: 2}), "details"),
        (run_reply(details={"flag": np.bool_(True)}), "details"),
        (
            StatusReply(
                moving=True, relocation=None, running=False, policy="", reason="", last_report=run_reply(reason=3)
            ),
            "last_report",
        ),
        (run_reply(reason="x" * MAX_LINE_BYTES), ""),
    ],
)
def test_a_reply_that_cannot_be_said_names_the_field(reply: ControlReply, field: str) -> None:
    with pytest.raises(ControlMalformed) as caught:
        encode_reply(reply)
    assert caught.value.field == field


def test_numbers_of_numpy_are_numbers() -> None:
    reply = run_reply(moved_blocks=np.int64(4), fragmentation_rate_before=np.float32(0.5), details={"n": np.uint8(7)})
    assert parse_reply(encode_reply(reply)) == run_reply(details={"n": 7})


def test_a_later_version_may_say_more_in_a_reply() -> None:
    message = json.loads(encode_reply(SwitchReply(on=True)))
    assert parse_reply(json.dumps({**message, "since_unix": 1.5}).encode()) == SwitchReply(on=True)
    with pytest.raises(ControlMalformed, match="on is missing"):
        parse_reply(line(reply="switch", reason=""))


@given(
    st.binary(max_size=300)
    | st.text(max_size=100).map(str.encode)
    | st.builds(lambda value: json.dumps(value).encode(), values)
)
@settings(max_examples=300)
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for parse in (parse_request, parse_reply):
        with pytest.raises(ControlMalformed):
            parse(data)


@given(
    st.sampled_from(["status", "plan", "compact", "moving", "relocation"]),
    st.dictionaries(
        st.sampled_from(["target", "max_moves", "on", "max_seconds", "verify", "max_step_seconds"]), values
    ),
)
@settings(max_examples=300)
def test_a_request_is_valid_or_refused_by_field(op: str, members: dict[str, Any]) -> None:
    data = json.dumps({"schema": SCHEMA, "op": op, **members}).encode()
    refused_field = None
    try:
        request = parse_request(data)
    except ControlMalformed as error:
        refused_field = error.field
    if refused_field is not None:
        assert refused_field in (*members, "on", "")
    else:
        assert parse_request(encode_request(request)) == request
        assert all(getattr(request, name) == value for name, value in members.items())
