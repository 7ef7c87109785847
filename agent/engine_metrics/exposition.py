"""Prometheus text, or Ollama's list of loaded models, into readings of engines. Pure.

What is not exported stays absent, what cannot be true is left out and said so, and nothing is derived that the engine
does not say.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from agent.engine_metrics.model import Answer, EngineReading, RankReading
from agent.engine_metrics.names import (
    DATA_PARALLEL_LABELS,
    MEANINGS,
    MODEL_LABELS,
    NAMES,
    WRITER_SAMPLE,
    Across,
    EngineKind,
    Name,
    Quantity,
)
from engine_shim.errors import KvatlasError

ROUNDING = 0.005  # by which a share may exceed 1
MAX_ENGINES = 64  # in one answer
MAX_NOTES = 8
MAX_MODEL = 256  # characters of a model's name, which comes from outside
MAX_LINES = 20_000  # of the table's names, which take the parser 0.2 s; 64 engines of a hundred processes have fewer
_FIELDS = tuple(name for name in NAMES if name.kind == "ollama")
_SAMPLES = tuple(name for name in NAMES if name.kind != "ollama")
_WANTED = frozenset(name.sample for name in _SAMPLES) | {WRITER_SAMPLE}
_NOT_TOLD = ("", "None", "none", "null")

_Key = tuple[EngineKind, str, int | None]  # kind, model, rank
_Samples = Mapping[str, Sequence[Sample]]


class NotMetrics(KvatlasError):
    """The answer is not what it should be; the text says in what way."""


def parse_exposition(text: str) -> Answer:
    """The engines in a text of format 0.0.4, or OpenMetrics. Raises NotMetrics where it is neither, or was cut off."""
    if text and not text.endswith("\n"):
        raise NotMetrics("the answer ends in the middle of a line")
    lines = list(islice(_wanted_lines(text), MAX_LINES + 1))
    if len(lines) > MAX_LINES:
        raise NotMetrics(f"the answer has more than {MAX_LINES:,} series of one engine's names")
    samples: dict[str, list[Sample]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                if sample.name in _WANTED:
                    samples[sample.name].append(sample)
    except (ValueError, KeyError, IndexError) as error:  # all of which the parser raises on text that is none
        raise NotMetrics(f"the answer is not Prometheus text: {error}") from error
    writers = [one.value for one in samples.pop(WRITER_SAMPLE, [])]
    notes: dict[tuple[EngineKind, str], list[str]] = defaultdict(list)
    found: dict[_Key, dict[Quantity, float]] = {}
    for key in _keys(samples):
        found[key] = _values(key, samples, notes[key[:2]])
    return Answer(_engines(found, notes), writers[0] if len(writers) == 1 else None)


def parse_ollama(text: str) -> Answer:
    """The models that Ollama's `/api/ps` lists, each an engine. It tells memory and context, nothing of KV blocks."""
    try:
        listed = json.loads(text)["models"]
        found: dict[_Key, dict[Quantity, float]] = {}
        for model in listed:
            values: dict[Quantity, float] = {}
            for name in _FIELDS:
                value = model.get(name.sample)
                if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                    values[name.quantity] = float(value)
            found["ollama", str(model.get("name") or model["model"])[:MAX_MODEL], None] = values
            if len(found) == MAX_ENGINES:
                break
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NotMetrics("the answer is not Ollama's list of loaded models") from error
    return Answer(_engines(found, {}))


def _wanted_lines(text: str) -> Iterator[str]:
    """The lines of the table's names alone: an engine exports thousands, and parsing them takes the agent's time."""
    for line in text.splitlines():
        name = line.lstrip().partition("{")[0].partition(" ")[0]
        if name in _WANTED:
            yield line.lstrip()


def _keys(samples: _Samples) -> list[_Key]:
    """Every engine and rank that a name of its own speaks of; properties alone, without a gauge, make none."""
    keys: dict[_Key, None] = {}
    for name in _SAMPLES:
        if not name.label:
            for one in samples.get(name.sample, ()):
                keys[name.kind, _model(one), _rank(one)] = None
    # A text may name the model in some lines only; those that do not then speak of it, too.
    named = {key[0] for key in keys if key[1]}
    kept = [key for key in keys if key[1] or key[0] not in named]
    return sorted(kept, key=lambda key: (key[0], key[1], -1 if key[2] is None else key[2]))[:MAX_ENGINES]


def _values(key: _Key, samples: _Samples, notes: list[str]) -> dict[Quantity, float]:
    values: dict[Quantity, float] = {}
    for name in _SAMPLES:
        if name.kind == key[0] and name.quantity not in values:
            value = _value(name, key, samples.get(name.sample, ()), notes)
            if value is not None:
                values[name.quantity] = value
    _derive(key[0], values, notes)
    return values


def _value(name: Name, key: _Key, samples: Sequence[Sample], notes: list[str]) -> float | None:
    """The maximum over the series of one engine, whose processes say the same; None where none is believable."""
    _, model, rank = key
    seen: dict[tuple[tuple[str, str], ...], float] = {}
    for one in samples:
        if _model(one) not in ("", model) or _rank(one) not in (None, rank):
            continue
        value = _number(one.labels.get(name.label)) if name.label else one.value
        if value is None:
            continue
        if wrong := _why_wrong(name, value):
            _note(notes, f"{name.sample} is {value:g}, which is {wrong}: left out")
            continue
        series = tuple(sorted(one.labels.items()))
        if not name.label and seen.get(series, value) != value:
            _note(notes, f"{name.sample} stands twice with the same labels, as {seen[series]:g} and {value:g}")
        seen[series] = max(value, seen.get(series, value))
    if not seen:
        return None
    value = max(seen.values())
    return min(value, 1.0) if MEANINGS[name.quantity].is_ratio else value


def _why_wrong(name: Name, value: float) -> str:
    if not math.isfinite(value):
        return "no number"
    if value < 0:
        return "below 0"
    if MEANINGS[name.quantity].is_ratio and value > 1 + ROUNDING:
        return "no share of 0 to 1" + (", and may be meant as percent" if value <= 100 else "")
    return ""


def _derive(kind: EngineKind, values: dict[Quantity, float], notes: list[str]) -> None:
    """The capacity, from blocks where the engine does not name tokens. Where it names both, and they differ, it is
    said: in hybrid models a block is not simply so many tokens, and neither number is silently made of the other."""
    blocks, each = values.get(Quantity.CAPACITY_BLOCKS), values.get(Quantity.BLOCK_TOKENS)
    if blocks is None or not each:
        return
    tokens = values.setdefault(Quantity.CAPACITY_TOKENS, blocks * each)
    if abs(tokens - blocks * each) > each:
        _note(notes, f"the engine says {tokens:,.0f} tokens, its {blocks:,.0f} blocks of {each:,.0f} hold "
                     f"{blocks * each:,.0f}")  # fmt: skip


def _engines(
    found: Mapping[_Key, Mapping[Quantity, float]], notes: Mapping[tuple[EngineKind, str], list[str]]
) -> tuple[EngineReading, ...]:
    by_engine: dict[tuple[EngineKind, str], list[RankReading]] = defaultdict(list)
    for (kind, model, rank), values in found.items():
        by_engine[kind, model].append(RankReading(rank, MappingProxyType(dict(values))))
    engines = []
    for key, ranks in by_engine.items():
        told = [one for one in ranks if one.rank is not None]
        ranks = told or ranks  # a line without a rank is of all of them, and was read into each
        total = MappingProxyType(combine([one.values for one in ranks]))
        engines.append(EngineReading(*key, tuple(ranks), total, tuple(notes.get(key, ()))))
    return tuple(engines)


def combine(ranks: Sequence[Mapping[Quantity, float]]) -> dict[Quantity, float]:
    """Data-parallel ranks as one: sums of what is counted, means of shares. A quantity that a rank lacks is absent."""
    total: dict[Quantity, float] = {}
    for quantity, meaning in MEANINGS.items():
        values = [rank[quantity] for rank in ranks if quantity in rank]
        if len(values) < len(ranks) or not values:
            continue
        if meaning.across is Across.SUM:
            total[quantity] = sum(values)
        elif meaning.across is Across.MEAN:
            weights = [rank.get(Quantity.CAPACITY_TOKENS, 0.0) for rank in ranks]
            if not all(weights):
                weights = [1.0] * len(ranks)
            total[quantity] = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
        elif len(set(values)) == 1:
            total[quantity] = values[0]
    return total


def _model(sample: Sample) -> str:
    told = (sample.labels.get(label, "") for label in MODEL_LABELS)
    return next((one[:MAX_MODEL] for one in told if one not in _NOT_TOLD), "")


def _rank(sample: Sample) -> int | None:
    for label in DATA_PARALLEL_LABELS:
        text = sample.labels.get(label, "")
        if text.isdecimal() and len(text) < 10:
            return int(text)
    return None


def _number(text: Any) -> float | None:
    """A label's number; None for what engines write where they do not know it, such as "None"."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def _note(notes: list[str], text: str) -> None:
    if text not in notes and len(notes) < MAX_NOTES:
        notes.append(text)


def counters_of(engines: Iterable[EngineReading]) -> dict[tuple[str, str, Quantity], float]:
    """Every counter by engine, to see whether one went back."""
    return {
        (engine.kind, engine.model, quantity): value
        for engine in engines
        for quantity, value in engine.total.items()
        if MEANINGS[quantity].is_counter
    }
