"""Trace files: every format, every refusal with its file and line, and shared prefixes made of `hash_ids`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_shim.errors import PoolError, SettingsError, TraceError
from engine_shim.pool.prefix import hash_prefix_blocks
from engine_shim.workload import (
    BUNDLED_TRACES,
    TraceRequest,
    first_requests,
    load_workload,
    prompt_content_ids,
    request_block_hashes,
)

CSV = "arrival_s,prompt_tokens,output_tokens\n"


def write(folder: Path, text: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_bundled_traces_load_by_name() -> None:
    conversation = load_workload("mooncake-conversation")
    assert (conversation.name, len(conversation.requests), conversation.skipped) == ("mooncake-conversation", 4000, 0)
    assert conversation.requests[0].hash_ids[:3] == (0, 1, 2)
    azure = load_workload("azure-conv")
    assert len(azure.requests) == 5000
    assert azure.requests[1] == TraceRequest(1, 4.314579, 396, 109)
    for workload in (conversation, azure):
        arrivals = [request.arrival_s for request in workload.requests]
        assert arrivals == sorted(arrivals)
    assert set(BUNDLED_TRACES) == {"mooncake-conversation", "azure-conv"}


def test_the_first_requests_of_a_trace() -> None:
    whole = load_workload("azure-conv")
    assert first_requests(whole, 3).requests == whole.requests[:3]
    assert first_requests(whole, 10**6) == first_requests(whole, None) == whole
    with pytest.raises(SettingsError, match="requests=0"):
        first_requests(whole, 0)


def test_jsonl_with_shared_prefixes(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": 0, "prompt_tokens": 600, "output_tokens": 5, "hash_ids": [7, 8]},
        {"arrival_s": 1.5, "prompt_tokens": 10, "output_tokens": 1},
    ]
    path = write(tmp_path, "\n".join(map(json.dumps, rows)) + "\n\n")
    workload = load_workload(path)
    assert workload.requests == (TraceRequest(0, 0.0, 600, 5, (7, 8)), TraceRequest(1, 1.5, 10, 1))
    assert workload.name == str(path)


def test_csv_with_other_columns_in_another_order_and_failed_requests(tmp_path: Path) -> None:
    text = "client,output_tokens,arrival_s,prompt_tokens\n3,10,0,20\n3,0,1,0\n4,0,2,9\n\n5,7,2.5,8\n"
    workload = load_workload(write(tmp_path, text))
    assert workload.requests == (TraceRequest(0, 0.0, 20, 10), TraceRequest(3, 2.5, 8, 7))
    assert workload.skipped == 2


def test_gzip_is_known_by_its_contents(tmp_path: Path) -> None:
    assert len(load_workload(write(tmp_path, gzip.compress((CSV + "0,1,1\n").encode()))).requests) == 1


def test_lengths_alone_arrive_evenly(tmp_path: Path) -> None:
    path = write(tmp_path, "prompt_tokens,output_tokens\n5,1\n0,0\n6,1\n")
    assert [request.arrival_s for request in load_workload(path, arrivals_per_second=4).requests] == [0.0, 0.5]
    assert [request.arrival_s for request in load_workload(path).requests] == [0.0, 1.0]
    with pytest.raises(TraceError, match="arrivals_per_second=0"):
        load_workload(path, arrivals_per_second=0)


def test_requests_are_put_in_order_of_arrival(tmp_path: Path) -> None:
    workload = load_workload(write(tmp_path, CSV + "2,1,1\n0,2,2\n"))
    assert [request.index for request in workload.requests] == [1, 0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "trace is empty; expected a CSV header or JSON lines"),
        ("\n \n", "is empty"),
        (CSV, "holds no request with tokens"),
        (CSV + "0,0,0\n", r"no request with tokens \(1 rows of 0 tokens\)"),
        ("arrival_s,prompt_tokens\n0,1\n", "line 1: no column output_tokens; the header has arrival_s, prompt_tokens"),
        (CSV + "0,1,1\n1,2\n", "line 3: 2 fields; expected 3"),
        (CSV + "0,1,1\n1,two,2\n", "line 3: prompt_tokens is 'two'; expected a whole number"),
        (CSV + "0,1.5,1\n", "line 2: prompt_tokens is '1.5'"),
        (CSV + "0,-1,1\n", "line 2: prompt_tokens is '-1'"),
        (CSV + "0,1,99999999999\n", "line 2: output_tokens is '99999999999'"),
        (CSV + "nan,1,1\n", "line 2: arrival_s is 'nan'; expected seconds"),
        (CSV + "-1,1,1\n", "line 2: arrival_s is '-1'"),
        (CSV + "1e300,1,1\n", "line 2: arrival_s is '1e300'; expected seconds from 0 to 1e"),
        (CSV + "1700000000000,1,1\n", "line 2: arrival_s is '1700000000000'"),
        (CSV + ",1,1\n", "line 2: arrival_s is ''"),
        ('{"prompt_tokens": 1, "output_tokens": 1}\n{"prompt_tokens": 1,\n', "line 2: not JSON"),
        ('{"prompt_tokens": 1, "output_tokens": 1}\n[1]\n', "line 2: a JSON list; expected one object a line"),
        ('{"prompt_tokens": 1}\n', "line 1: output_tokens is None"),
        ('{"prompt_tokens": true, "output_tokens": 1}\n', "line 1: prompt_tokens is True"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "arrival_s": null}\n', "line 1: arrival_s is None"),
        ('{"prompt_tokens": 513, "output_tokens": 1, "hash_ids": [1]}\n', "line 1: 1 hash_ids .* expected 2"),
        ('{"prompt_tokens": 5, "output_tokens": 1, "hash_ids": ["a"]}\n', "line 1: hash_ids is not a list of whole"),
        ('{"prompt_tokens": 5, "output_tokens": 1, "hash_ids": 3}\n', "line 1: hash_ids is not a list"),
    ],
)
def test_bad_traces_name_file_and_line(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceError, match=expected) as error:
        load_workload(path)
    assert str(path) in str(error.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="trace, line 2: bytes that are not UTF-8"):
        load_workload(write(tmp_path, CSV.encode() + b"\xff\xfe,1,1\n"))


def test_damaged_gzip(tmp_path: Path) -> None:
    whole = gzip.compress((CSV + "0,1,1\n" * 100).encode())
    for damaged in (whole[:-9], whole[:12] + b"\x00\xff" + whole[14:]):
        with pytest.raises(TraceError, match="damaged gzip"):
            load_workload(write(tmp_path, damaged))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere.csv does not exist; .* mooncake-conversation"):
        load_workload(tmp_path / "nowhere.csv")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        load_workload(tmp_path)


requests = st.builds(
    lambda index, ids, last, output: TraceRequest(index, 0.0, 512 * (len(ids) - 1) + last, output, tuple(ids)),
    st.integers(0, 50),
    st.lists(st.integers(0, 2), min_size=1, max_size=3),
    st.integers(1, 512),
    st.integers(1, 40),
)


@given(requests, requests, st.sampled_from([1, 16, 48, 512, 700]))
def test_hashes_are_equal_exactly_where_the_prefixes_are(one: TraceRequest, two: TraceRequest, size: int) -> None:
    """Also for block sizes that do not divide 512. Requests of one index are the same request."""
    first, second = request_block_hashes(one, size), request_block_hashes(two, size)
    assert len(first) == (one.prompt_tokens + one.output_tokens) // size
    assert len(set(first)) == len(first)
    shared = 0
    while shared < min(len(one.hash_ids), len(two.hash_ids)) and one.hash_ids[shared] == two.hash_ids[shared]:
        shared += 1
    common_tokens = min(shared * 512, one.prompt_tokens, two.prompt_tokens)
    if one.index != two.index:
        equal = sum(a == b for a, b in zip(first, second, strict=False))
        assert equal == common_tokens // size
        assert len(set(first) & set(second)) == equal
    assert request_block_hashes(one, size, salt="tenant") != first or not first


def test_requests_without_prefix_ids_share_nothing() -> None:
    one, two = TraceRequest(0, 0.0, 64, 16), TraceRequest(1, 0.0, 64, 16)
    assert len(request_block_hashes(one, 16)) == 5
    assert not set(request_block_hashes(one, 16)) & set(request_block_hashes(two, 16))
    assert not set(prompt_content_ids(one, 0, 64)) & set(prompt_content_ids(two, 0, 64))


def test_content_agrees_with_the_hashes() -> None:
    one = TraceRequest(0, 0.0, 1000, 1, (4, 5))
    two = TraceRequest(1, 0.0, 700, 1, (4, 6))
    first, second = prompt_content_ids(one, 0, 1000), prompt_content_ids(two, 0, 700)
    assert len(first) == len(set(first)) == 1000
    assert first[:512] == second[:512]
    assert not set(first[512:]) & set(second[512:])
    assert prompt_content_ids(one, 500, 520) == first[500:520]
    assert all(0 <= content < 2**63 for content in first)


def test_chained_hashes_stand_for_all_that_came_before() -> None:
    tokens = list(range(50))
    hashes = hash_prefix_blocks(tokens, 16)
    assert len(hashes) == 3  # the last two tokens fill no block
    assert hash_prefix_blocks(tokens[:32], 16) == hashes[:2]
    assert hash_prefix_blocks(tokens[16:], 16, parent=hashes[0]) == hashes[1:]
    assert hash_prefix_blocks(tokens[16:], 16)[0] != hashes[1]
    assert hash_prefix_blocks([99, *tokens[1:]], 16)[2] != hashes[2]
    assert hash_prefix_blocks(tokens, 16, salt="tenant")[0] != hashes[0]
    assert hash_prefix_blocks([-1] * 16, 16) != hash_prefix_blocks([-2] * 16, 16)
    assert hash_prefix_blocks([], 16) == []
    with pytest.raises(PoolError, match="block_tokens=0"):
        hash_prefix_blocks(tokens, 0)
