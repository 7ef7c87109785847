"""A plan and its advice as HTML text, and what the form's fields ask for. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.wire.plan import LiveAdvice, PlanAnswer
from dashboard.palette import Theme
from dashboard.widgets import Tile, heading_html, note_html, tiles_html
from dashboard.wording import NOT_KNOWN, count, counted, escape, noun, share, size

GIB = 1 << 30
MAX_CONFIG_BYTES = 2 << 20
OWN = "the model's"
ENGINES = "the engine's default"
OTHER_GPU = "another"
TENSOR_PARALLEL = (1, 2, 4, 8, 16)
LENGTHS = (OWN, *(2**power for power in range(11, 21)))
SEQUENCES = (ENGINES, *range(1, 513))
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)


class NotAConfig(ValueError):
    """The file is none; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Form:
    """What the operator has filled in."""

    preset: str | None
    config: Mapping[str, Any] | None  # in place of a preset
    model: str | None  # what to call that
    gpu: str | None
    gpu_memory_gib: float | None  # in place of a card's
    tp: int
    kv_dtype: str
    weight_dtype: str
    block_size: int
    max_model_len: int | None  # None: the model's
    max_num_seqs: int | None  # None: the engine's default
    utilization: float
    headroom: float
    co_tenant_gib: float

    def to_json(self) -> dict[str, Any]:
        """The body of POST /v1/plan."""
        asked: dict[str, Any] = {
            "tp": self.tp,
            "kv_dtype": self.kv_dtype,
            "weight_dtype": self.weight_dtype,
            "block_size": self.block_size,
            "gpu_memory_utilization": self.utilization,
            "headroom": self.headroom,
            "co_tenant_gib": self.co_tenant_gib,
            "advise": True,
        }
        named = {
            "preset": self.preset if self.config is None else None,
            "config": self.config,
            "model": self.model,
            "gpu": self.gpu,
            "gpu_memory_gib": self.gpu_memory_gib,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
        }
        return asked | {name: value for name, value in named.items() if value is not None}


def read_config(data: bytes) -> dict[str, Any]:
    """A model's config.json as it was uploaded. Raises NotAConfig."""
    if len(data) > MAX_CONFIG_BYTES:
        raise NotAConfig(f"The file is larger than {MAX_CONFIG_BYTES >> 20} MiB: give the model's config.json alone.")
    try:
        value = json.loads(data.decode("utf-8-sig"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise NotAConfig(f"The file is no JSON ({error}): give the model's config.json.") from error
    if not isinstance(value, dict):
        raise NotAConfig("The file holds no JSON object: give the model's config.json.")
    return value


def plan_html(found: PlanAnswer, theme: Theme) -> str:
    """What fits, what it is made of, and the sums in words."""
    more: Mapping[str, Any] = found.model_extra or {}
    verdict = note_html(str(more.get("verdict", "")))
    warnings = "".join(f'<p class="kv-warning">{escape(one)}</p>' for one in found.warnings)
    if found.confidence == "refused":
        return warnings or verdict
    tiles = tiles_html(_tiles(found, more))
    sums = "".join(f"<li>{escape(line)}</li>" for line in found.arithmetic)
    notes = "".join(note_html(str(one)) for one in more.get("notes", ()))
    body = tiles + verdict + warnings + _memory(found.memory, theme)
    return body + heading_html("Arithmetic") + f'<ol class="kv-sums">{sums}</ol>' + notes


def advice_html(found: PlanAnswer) -> str:
    """What to change, best first, and what is ruled out."""
    advice, together = found.advice, found.advice_together
    if advice is None:
        return ""
    head = heading_html("What to change", "best first; each gain is the difference of two plans")
    if together is not None:
        changes = ", ".join(map(str, together.get("changes", ())))
        head += note_html(f"Together: {changes}. {together.get('verdict', '')}")
    return head + _options(advice, lambda one: _planned_gain(one, fits_already=found.fits is True))


def live_html(found: LiveAdvice) -> str:
    """What to change in an engine that runs."""
    head = heading_html(f"Advice for {found.engine}", found.model)
    return head + note_html(found.verdict) + _options(found.options, _live_gain)


def _tiles(found: PlanAnswer, more: Mapping[str, Any]) -> list[Tile]:
    fits = {True: "yes", False: "no", None: NOT_KNOWN}[found.fits]
    short = more.get("shortfall_bytes") or (found.memory or {}).get("deficit_bytes")
    needed = f"{size(short)} are missing" if short and not found.fits else f"confidence {found.confidence}"
    pool = (found.memory or {}).get("pool_bytes")
    at_once = found.max_concurrent_sequences
    return [
        Tile(
            "Fits", fits, needed, "Whether the sequences that are asked for fit at once.", "" if found.fits else "bad"
        ),
        Tile("Pool", size(pool), counted(found.num_blocks, "block"), "What is left for the KV cache of one GPU."),
        Tile("Tokens", count(found.pool_tokens), f"of {count(more.get('max_model_len'))} a sequence", "In all blocks."),
        Tile("Sequences", count(at_once), "of that length at once", "By the reserve: every layer whole."),
        Tile(
            "KV a token",
            size(found.kv_bytes_per_token),
            f"{count(found.kv_bytes_per_token)} B on one GPU",
            "As the engine reserves it.",
        ),
        Tile("KV a block", size(found.kv_bytes_per_block), f"{found.attention or ''}", "On one GPU."),
    ]


def _memory(memory: Mapping[str, Any] | None, theme: Theme) -> str:
    if memory is None:
        return note_html("No GPU is named, so that what is left for the pool is not known.")
    total, budget = memory.get("total_bytes"), memory.get("budget_bytes")
    parts = [
        ("weights", memory.get("weights_bytes"), theme.states["cached"], str(memory.get("weights_source", ""))),
        ("activations", memory.get("activation_bytes"), theme.states["pinned"], "peak of one step"),
        ("the rest", memory.get("other_bytes"), theme.states["reserved"], "context, graphs"),
        ("KV pool", memory.get("pool_bytes"), theme.states["used"], "what is left of the budget"),
        ("co-tenants", memory.get("co_tenant_bytes"), theme.states["unknown"], "other processes, as given"),
    ]
    rows = "".join(
        f'<tr><td><i style="background:{colour}"></i>{name}<small>{escape(why)}</small></td><td>{size(held)}</td>'
        f"<td>{share(held, total) if held is not None and total else NOT_KNOWN}</td></tr>"
        for name, held, colour, why in parts
    )
    bar = "".join(f'<i style="flex-grow:{held};background:{colour}"></i>' for _, held, colour, _ in parts if held)
    head = "<tr><th>of one GPU</th><th>size</th><th>share</th></tr>"
    last = f'<tr class="kv-total"><td>GPU</td><td>{size(total)}</td><td></td></tr>'
    budgeted = note_html(f"The engine may take {size(budget)} of it.") if budget else ""
    return f'<div class="kv-holds">{bar}</div><table class="kv-table kv-states">{head}{rows}{last}</table>{budgeted}'


def _options(options: Sequence[Mapping[str, Any]], gain: Callable[[Mapping[str, Any]], str]) -> str:
    possible = [one for one in options if one.get("possible")]
    out = [one for one in options if not one.get("possible")]
    rows = "".join(_option(number, one, gain(one)) for number, one in enumerate(possible, start=1))
    names = ("", "change", "brings", "arithmetic", "quality", "how")
    head = "<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"
    table = f'<table class="kv-table kv-words">{head}{rows}</table>' if possible else note_html("Nothing would help.")
    ruled_out = "".join(f"<li>{escape(str(one['title']))}: {escape(str(one.get('why_not')))}</li>" for one in out)
    return table + (f'<p class="kv-note">Ruled out:</p><ul class="kv-sums">{ruled_out}</ul>' if out else "")


def _option(number: int, one: Mapping[str, Any], brings: str) -> str:
    price = f"<br>price: {escape(str(one['price']))}" if one.get("price") else ""
    cells = (
        f"<b>{escape(str(one['title']))}</b><br>{escape(str(one['change']))}",
        escape(brings),
        escape(str(one.get("arithmetic", ""))),
        escape(str(one.get("quality", ""))) + price,
        escape(_flags(one)),
    )
    return f'<tr><td class="kv-number">{number}</td>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _planned_gain(one: Mapping[str, Any], *, fits_already: bool) -> str:
    gain: Mapping[str, Any] = one.get("gain") or {}
    parts = [
        _more(gain.get("sequences"), "sequence"),
        _more(gain.get("tokens"), "token"),
        _more(gain.get("gpus"), "GPU"),
        ""
        if one.get("fits") is None
        else "does not fit yet"
        if not one["fits"]
        else ""
        if fits_already
        else "fits then",
    ]
    return ", ".join(part for part in parts if part)


def _live_gain(one: Mapping[str, Any]) -> str:
    gain: Mapping[str, Any] = one.get("gain") or {}
    parts = [
        _more(gain.get("tokens"), "token"),
        _more(gain.get("sequences"), "sequence as they run now", "sequences as they run now"),
    ]
    return ", ".join(part for part in parts if part)


def _more(gain: int | None, one: str, many: str | None = None) -> str:
    """+1 GPU, -2,000 tokens; nothing where nothing is gained or lost."""
    return f"{gain:+,} {noun(gain, one, many)}" if gain else ""


def _flags(one: Mapping[str, Any]) -> str:
    flags: Mapping[str, Any] = one.get("flags") or {}
    return "; ".join(f"{engine}: {text}" for engine, text in flags.items() if text) or "no engine has a flag for it"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
