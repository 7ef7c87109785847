"""Trace files to requests: what arrives when, how long its prompt and answer are, and which prefixes are shared."""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

from engine_shim.errors import SettingsError, TraceError

TRACE_PREFIX_TOKENS = 512  # tokens that one entry of `hash_ids` stands for
DEFAULT_ARRIVALS_PER_SECOND = 2.0
MAX_ARRIVAL_S = 1e10  # three hundred years; more is another unit, such as milliseconds since 1970

_BUNDLED_FOLDER = Path(__file__).parent / "traces"
BUNDLED_TRACES: Mapping[str, str] = {
    "mooncake-conversation": "mooncake_conversation_0-3999.jsonl.gz",
    "azure-conv": "azure2023_conv_0-4999.csv.gz",
}


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. Counts are tokens, both at least 1."""

    index: int  # row in the file, from 0, failed requests included
    arrival_s: float  # seconds since the trace began
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()  # one per 512 prompt tokens; equal ids: equal prompts up to that block's end


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace that has been read: `requests` in order of arrival; `skipped` rows were failed requests of 0 tokens."""

    name: str
    requests: tuple[TraceRequest, ...]
    skipped: int


def load_workload(trace: str | Path, *, arrivals_per_second: float = DEFAULT_ARRIVALS_PER_SECOND) -> Workload:
    """Read a bundled trace by its name, or a file: CSV or JSON lines, plain or gzip, told apart by contents.

    CSV columns: `prompt_tokens`, `output_tokens` and, where recorded, `arrival_s`; others are ignored. JSON lines
    have the same keys and may have `hash_ids`. Without arrival times request i arrives at i / arrivals_per_second.
    TraceError names the file, the line and what was expected there.
    """
    if not (math.isfinite(arrivals_per_second) and arrivals_per_second > 0):
        raise TraceError(f"arrivals_per_second={arrivals_per_second} must be above 0")
    path = (
        _BUNDLED_FOLDER / BUNDLED_TRACES[trace] if isinstance(trace, str) and trace in BUNDLED_TRACES else Path(trace)
    )
    lines = _read_text(path).splitlines()
    first = next((line.lstrip() for line in lines if line.strip()), None)
    if first is None:
        raise TraceError(f"{path} is empty; expected a CSV header or JSON lines with prompt_tokens and output_tokens")
    rows = _json_rows(path, lines) if first.startswith("{") else _csv_rows(path, lines)
    requests: list[TraceRequest] = []
    skipped = 0
    for index, (line, row) in enumerate(rows):
        request = _request(partial(_error, path, line), index, row, arrivals_per_second)
        if request is None:
            skipped += 1
        else:
            requests.append(request)
    if not requests:
        raise TraceError(f"{path} holds no request with tokens ({skipped} rows of 0 tokens)")
    requests.sort(key=lambda request: request.arrival_s)
    return Workload(str(trace), tuple(requests), skipped)


def first_requests(workload: Workload, count: int | None) -> Workload:
    """The first `count` requests by arrival, all where it is None or more than there are. SettingsError below 1."""
    if count is None:
        return workload
    if count < 1:
        raise SettingsError(f"requests={count}: at least one request must be served")
    return replace(workload, requests=workload.requests[:count])


def request_block_hashes(request: TraceRequest, block_tokens: int, *, salt: str = "") -> list[int]:
    """Name every full block of the request's whole sequence, prompt and answer, for the prefix cache.

    Two requests get equal values for a block exactly where it ends inside both prompts and their `hash_ids` agree up
    to and including the 512-token block it ends in. Everything else, answers too, is this request's own.
    """
    own = _link(salt.encode(), b"request", request.index.to_bytes(8, "little", signed=True))
    chain = salt.encode()
    links: list[int] = []
    for hash_id in request.hash_ids:
        chain = _link(chain, b"prefix", hash_id.to_bytes(16, "little", signed=True))
        links.append(int.from_bytes(chain, "little"))
    total = request.prompt_tokens + request.output_tokens
    shared_tokens = request.prompt_tokens if links else 0
    private = int.from_bytes(own, "little")
    hashes = []
    for end in range(block_tokens, total + 1, block_tokens):
        base = links[(end - 1) // TRACE_PREFIX_TOKENS] if end <= shared_tokens else private
        hashes.append(base + end)
    return hashes


def prompt_content_ids(request: TraceRequest, start: int, stop: int) -> list[int]:
    """A content number (non-negative, below 2**63) for each prompt token from `start` to before `stop`.

    Prompts that share a prefix by `hash_ids` have equal numbers there; no other prompts do.
    """
    if not request.hash_ids:
        base = (1 << 62) + (request.index << 32)
        return list(range(base + start, base + stop))
    ids = request.hash_ids
    return [
        (ids[token // TRACE_PREFIX_TOKENS] * TRACE_PREFIX_TOKENS + token % TRACE_PREFIX_TOKENS) % (1 << 62)
        for token in range(start, stop)
    ]


def _link(parent: bytes, kind: bytes, content: bytes) -> bytes:
    return blake2b(parent + b"\0" + content, digest_size=16, person=kind).digest()


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise TraceError(
            f"{path} does not exist; give a trace file or one of the bundled traces: {', '.join(BUNDLED_TRACES)}"
        ) from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{path} is a damaged gzip file: {error}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _error(path, line, "bytes that are not UTF-8; expected CSV or JSON lines") from error


def _csv_rows(path: Path, lines: list[str]) -> Iterator[tuple[int, Mapping[str, object]]]:
    reader = csv.reader(lines)
    header: list[str] | None = None
    try:
        for row in reader:
            if not any(field.strip() for field in row):
                continue
            if header is None:
                header = [name.strip() for name in row]
                missing = [name for name in ("prompt_tokens", "output_tokens") if name not in header]
                if missing:
                    raise _error(path, reader.line_num, f"no column {missing[0]}; the header has {', '.join(header)}")
                continue
            if len(row) != len(header):
                raise _error(path, reader.line_num, f"{len(row)} fields; expected {len(header)}, as in the header")
            yield reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise _error(path, reader.line_num, f"not CSV: {error}") from error


def _json_rows(path: Path, lines: list[str]) -> Iterator[tuple[int, Mapping[str, object]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _error(path, number, f"not JSON: {error}; expected one object a line") from error
        if not isinstance(row, dict):
            raise _error(path, number, f"a JSON {type(row).__name__}; expected one object a line")
        yield number, row


def _request(
    error: Callable[[str], TraceError], index: int, row: Mapping[str, object], arrivals_per_second: float
) -> TraceRequest | None:
    prompt = _count(error, row, "prompt_tokens")
    output = _count(error, row, "output_tokens")
    arrival = _seconds(error, row["arrival_s"]) if "arrival_s" in row else index / arrivals_per_second
    hash_ids = row.get("hash_ids", ())
    if not isinstance(hash_ids, (list, tuple)) or not all(type(i) is int and abs(i) < 1 << 63 for i in hash_ids):
        raise error("hash_ids is not a list of whole numbers")
    if prompt == 0 or output == 0:
        return None
    if hash_ids and len(hash_ids) != -(-prompt // TRACE_PREFIX_TOKENS):
        wanted = -(-prompt // TRACE_PREFIX_TOKENS)
        raise error(f"{len(hash_ids)} hash_ids for {prompt} prompt tokens; expected {wanted}, one per 512 tokens")
    return TraceRequest(index, arrival, prompt, output, tuple(hash_ids))


def _count(error: Callable[[str], TraceError], row: Mapping[str, object], key: str) -> int:
    value = row.get(key)
    try:
        count = int(value) if isinstance(value, str) else value
    except ValueError:
        count = None
    if type(count) is not int or not 0 <= count < 1 << 31:
        raise error(f"{key} is {value!r}; expected a whole number of tokens from 0")
    return count


def _seconds(error: Callable[[str], TraceError], value: object) -> float:
    try:
        seconds = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds <= MAX_ARRIVAL_S:  # false for NaN
        raise error(f"arrival_s is {value!r}; expected seconds from 0 to {MAX_ARRIVAL_S:g}")
    return seconds


def _error(path: Path, line: int, what: str) -> TraceError:
    return TraceError(f"{path}, line {line}: {what}")
