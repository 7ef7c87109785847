"""Advice for an engine that runs, from what its map says: what is short, what each change would bring, what would not.

Pure. A map knows the pool's bytes, its live share, tails, preemptions and evictions; it does not know the model. With
the model's config as well, the planner's own advice for the pool as it is stands beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agent.capacity.advisor import ANOTHER_MODEL, DIFFICULTY, Option, advise
from agent.capacity.config_reader import read_geometry
from agent.capacity.deployment import DEFAULT_BLOCK_TOKENS, Deployment
from agent.capacity.engine_flags import RECIPES, Recipe
from agent.capacity.formats import KV_ALIASES, KV_FORMATS
from agent.capacity.planner import plan
from agent.fragmentation import FragmentationReport
from engine_shim.snapshot import MapFlags, MapSnapshot

SCHEMA = "kvatlas.advise/v1"
CROWDED = 0.90  # live share above which the pool counts as nearly full
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1, "int8": 1}
LIVE_KEYS = ("headroom", "block-size", "kv-fp8", "fewer-sequences", "kv-offload", "allocation-policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePool:
    """One pool as its map has it. Counters are since the engine started; blocks are of the whole pool."""

    engine: str
    model: str
    kind: str
    dtype: str
    tensor_parallel: int
    total_blocks: int
    usable_blocks: int
    block_tokens: int
    block_bytes: int
    live_blocks: int  # used and pinned
    cached_blocks: int
    headroom_blocks: int
    waste_tokens: int | None  # empty slots at the ends of live blocks
    running: int
    waiting: int
    preemptions: int
    evicted_blocks: int
    reused_blocks: int
    fragmentation_rate: float | None
    relocating: bool
    has_states: bool
    unknown: str = ""  # why the states of its blocks, and what is counted of them, say nothing; "" where they do

    @property
    def live_share(self) -> float:
        """Of the blocks that can be allocated at all."""
        return self.live_blocks / self.usable_blocks if self.usable_blocks else 0.0

    @property
    def blocks_per_sequence(self) -> float | None:
        """Mean of the running ones; None where none runs."""
        return self.live_blocks / self.running if self.running and self.live_blocks else None


def live_pool(
    snapshot: MapSnapshot, report: FragmentationReport, waste_tokens: int | None, unknown: str = ""
) -> LivePool:
    """The numbers of one snapshot that advice is made of; `unknown` is why they are not those of an engine that runs,
    beside what the map says of itself."""
    identity, counters = snapshot.identity, snapshot.counters
    return LivePool(
        engine=identity.engine_id,
        model=identity.model,
        kind=identity.kind,
        dtype=identity.dtype.removeprefix("torch."),
        tensor_parallel=max(1, identity.tensor_parallel_size),
        total_blocks=report.total_blocks,
        usable_blocks=report.usable_blocks,
        block_tokens=identity.block_tokens,
        block_bytes=identity.block_bytes,
        live_blocks=report.used_blocks + report.pinned_blocks,
        cached_blocks=report.cached_blocks,
        headroom_blocks=identity.headroom_blocks,
        waste_tokens=waste_tokens,
        running=snapshot.running_requests,
        waiting=snapshot.waiting_requests,
        preemptions=counters.get("preemptions", 0),
        evicted_blocks=counters.get("blocks_evicted", 0),
        reused_blocks=counters.get("blocks_reused", 0),
        fragmentation_rate=report.fragmentation_rate,
        relocating=snapshot.flags.relocating,
        has_states=any(group.kind == "state" for group in snapshot.groups),
        unknown=unknown or _unknown(snapshot.flags),
    )


def _unknown(flags: MapFlags) -> str:
    if flags.sleeping:
        return "the engine sleeps, and has given its KV memory back"
    return "the map's observer has given up following the pool" if flags.degraded else ""


@dataclass(frozen=True, slots=True)
class LiveOption:
    """One change. Gains are blocks of the pool as it is, `tokens` their slots, `sequences` such as run now on average;
    all None where it is ruled out."""

    key: str
    recipe: Recipe
    change: str
    bytes: int | None
    tokens: int | None
    sequences: int | None
    why_not: str | None
    arithmetic: str

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        gain = {"bytes": self.bytes, "tokens": self.tokens, "sequences": self.sequences}
        return {
            "option": self.key,
            "title": self.recipe.title,
            "change": self.change,
            "possible": self.why_not is None,
            "why_not": self.why_not,
            "gain": gain if self.why_not is None else None,
            "arithmetic": self.arithmetic,
            "quality": self.recipe.quality,
            "quality_source": self.recipe.source,
            "price": self.recipe.price,
            "difficulty": DIFFICULTY[self.recipe.effort],
            "flags": self.recipe.flags,
        }


def pressure(pool: LivePool) -> tuple[bool | None, str]:
    """Whether memory is short, None where that is not known, and what says so."""
    if pool.unknown:
        return None, f"whether memory is short is not known: {pool.unknown}"
    blocks = f"{pool.live_blocks:,} of {pool.usable_blocks:,} blocks are live ({pool.live_share:.0%})"
    if pool.preemptions:
        return True, f"memory is short: {pool.preemptions:,} preemptions since the start; {blocks}"
    if pool.waiting and pool.live_share >= CROWDED:
        return True, f"memory is short: {pool.waiting:,} requests wait and {blocks}"
    if pool.live_share >= CROWDED:
        return True, f"memory is nearly short: {blocks}"
    return False, f"memory is not short: {blocks}, no preemptions"


def advise_live(pool: LivePool) -> tuple[LiveOption, ...]:
    """Every option that a map can judge, those that bring something first, of less effort before more."""
    if pool.unknown:
        return tuple(_out(key, f"not known: {pool.unknown}") for key in LIVE_KEYS)
    made = {
        "headroom": _headroom(pool),
        "block-size": _block_size(pool),
        "kv-fp8": _eight_bits(pool),
        "fewer-sequences": _fewer_sequences(pool),
        "kv-offload": _offload(pool),
        "allocation-policy": _allocation(pool),
    }
    return tuple(
        sorted(made.values(), key=lambda one: (one.why_not is not None, one.recipe.effort, -(one.tokens or 0), one.key))
    )


def _out(key: str, why_not: str) -> LiveOption:
    return LiveOption(key, RECIPES[key], "", None, None, None, why_not, "")


def _made(pool: LivePool, key: str, change: str, blocks: int, arithmetic: str) -> LiveOption:
    each = pool.blocks_per_sequence
    sequences = None if each is None else int(blocks / each)
    tokens = blocks * pool.block_tokens
    return LiveOption(key, RECIPES[key], change, blocks * pool.block_bytes, tokens, sequences, None, arithmetic)


def _headroom(pool: LivePool) -> LiveOption:
    if not pool.headroom_blocks:
        return _out("headroom", "no headroom is held back")
    if pool.preemptions:
        return _out("headroom", f"{pool.headroom_blocks:,} blocks are held back, and running sequences were preempted "
                    f"{pool.preemptions:,} times even so")  # fmt: skip
    words = f"{pool.headroom_blocks:,} blocks × {pool.block_bytes:,} B"
    return _made(pool, "headroom", f"headroom {pool.headroom_blocks:,} blocks → 0", pool.headroom_blocks, words)


def _block_size(pool: LivePool) -> LiveOption:
    if pool.waste_tokens is None:
        return _out("block-size", "the map has no column of tokens, so what the tails waste is not known")
    slots = pool.live_blocks * pool.block_tokens
    share = pool.waste_tokens / slots if slots else 0.0
    now = f"tails of live blocks waste {pool.waste_tokens:,} of {slots:,} slots ({share:.1%})"
    if pool.has_states:
        return _out("block-size", f"{now}; the engine sets the size itself, as large as a state")
    if pool.block_tokens <= DEFAULT_BLOCK_TOKENS:
        return _out("block-size", f"{now}; blocks have {pool.block_tokens} tokens already")
    # Tails are half a block on average, so they shrink as the blocks do.
    saved = pool.waste_tokens - pool.waste_tokens * DEFAULT_BLOCK_TOKENS // pool.block_tokens
    blocks = saved // pool.block_tokens
    if not blocks:
        return _out("block-size", f"{now}: less than a block in all would be saved")
    words = f"{now}; of {DEFAULT_BLOCK_TOKENS}/{pool.block_tokens} the size they waste that part: {saved:,} slots saved"
    return _made(pool, "block-size", f"block size {pool.block_tokens} → {DEFAULT_BLOCK_TOKENS} tokens", blocks, words)


def _eight_bits(pool: LivePool) -> LiveOption:
    size = ELEMENT_BYTES.get(pool.dtype)
    known = KV_FORMATS.get(KV_ALIASES.get(pool.dtype, pool.dtype))
    if known is not None and known.bits < 16:
        return _out("kv-fp8", f"the cache is {pool.dtype} already")
    if size is None:
        return _out("kv-fp8", f"the map names the cache's dtype {pool.dtype or '(none)'}, whose size is not known here")
    if size == 1:
        return _out("kv-fp8", f"the cache is {pool.dtype} already")
    if pool.block_bytes < size:
        return _out("kv-fp8", f"the map gives {pool.block_bytes} B a block: its engine does not tell how large")
    if pool.has_states:
        return _out("kv-fp8", "states share the pool's blocks and keep their size: give the model's config to see more")
    total = pool.total_blocks * pool.block_bytes
    smaller = pool.block_bytes // size
    after = total // smaller
    words = (
        f"{total:,} B / {pool.block_bytes:,} B = {pool.total_blocks:,} blocks; {total:,} B / {smaller:,} B = {after:,}"
    )
    option = _made(pool, "kv-fp8", f"kv dtype {pool.dtype} → fp8", after - pool.total_blocks, words)
    return replace(option, bytes=0)  # the pool is as large as it was; its blocks are smaller


def _fewer_sequences(pool: LivePool) -> LiveOption:
    each = pool.blocks_per_sequence
    if not pool.preemptions:
        return _out("fewer-sequences", "no running sequence was preempted: as many run as fit")
    if each is None:
        return _out("fewer-sequences", "nothing runs now, so the size of a sequence is not known")
    if pool.running == 1:
        return _out("fewer-sequences", f"one sequence runs now, of {each:.1f} blocks: fewer would be none")
    fitting = max(1, int((pool.usable_blocks - pool.headroom_blocks) * CROWDED / each))
    if fitting >= pool.running:
        return _out("fewer-sequences", f"{pool.running:,} run now, of {each:.1f} blocks on average, and {fitting:,} "
                    f"such fill {CROWDED:.0%} of the pool: a limit there would hold none back")  # fmt: skip
    words = (
        f"a running sequence holds {each:.1f} blocks on average: {fitting:,} of them fill {CROWDED:.0%} of the pool, "
        f"and {pool.running:,} run now; each of the {pool.preemptions:,} preemptions computed a sequence anew"
    )
    change = f"at most {fitting:,} sequence{'s' if fitting > 1 else ''} at once"
    return LiveOption("fewer-sequences", RECIPES["fewer-sequences"], change, 0, 0, 0, None, words)


def _offload(pool: LivePool) -> LiveOption:
    if not pool.evicted_blocks:
        return _out("kv-offload", "no cached prefix was evicted: there is nothing that the host would keep")
    lost = pool.evicted_blocks * pool.block_bytes
    words = (
        f"{pool.evicted_blocks:,} blocks of cached prefixes were evicted since the start ({_gib(lost)}), while "
        f"{pool.reused_blocks:,} were reused; it adds nothing for running sequences"
    )
    return LiveOption(
        "kv-offload", RECIPES["kv-offload"], "cached prefixes to host memory", 0, 0, 0, None, words
    )  # fmt: skip


def _allocation(pool: LivePool) -> LiveOption:
    rate = "undefined" if pool.fragmentation_rate is None else f"{pool.fragmentation_rate:.3f}"
    if pool.relocating:
        return _out("allocation-policy", f"relocating allocation is on; the fragmentation rate is {rate}")
    return _out(
        "allocation-policy",
        f"the fragmentation rate is {rate}, which costs a paged pool no memory; it pays where something wants "
        "neighbouring blocks, such as KV transfer, offload, or an elastic pool",
    )


def advise_model(pool: LivePool, config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Option, ...]]:
    """What the planner makes of the model's config for this pool: whether both agree on a block, and its options.

    Raises SettingsError and LayoutUnknown as the planner does.
    """
    kv = {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "uint8": "fp8"}.get(pool.dtype, pool.dtype)
    deployment = Deployment(
        kv_cache_bytes=pool.total_blocks * pool.block_bytes,
        block_tokens=pool.block_tokens,
        tp=pool.tensor_parallel,
        kv_dtype=kv or "auto",
    )
    geometry = read_geometry(config, pool.model or None)
    found = plan(geometry, deployment)
    agrees = found.kv_bytes_per_block == pool.block_bytes
    words = f"the map says {pool.block_bytes:,} B a block, the planner {found.kv_bytes_per_block:,} B"
    facts = {"agrees": agrees, "kv_bytes_per_block": found.kv_bytes_per_block, "words": words}
    return facts, advise(geometry, deployment) if agrees else ()


def to_json(pool: LivePool, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The whole answer as plain JSON values."""
    short, words = pressure(pool)
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "engine": pool.engine,
        "model": pool.model,
        "memory_is_short": short,
        "verdict": words,
        "pool_bytes": pool.total_blocks * pool.block_bytes,
        "live_share": None if pool.unknown else pool.live_share,
        "options": [one.to_json() for one in advise_live(pool)],
        "planned": None,
        "planned_options": None,
    }
    if config is not None:
        facts["planned"], options = advise_model(pool, config)
        facts["planned_options"] = [one.to_json() for one in options if one.recipe.effort < ANOTHER_MODEL]
    return facts


def render(facts: Mapping[str, Any]) -> str:
    """The same for people."""
    lines = [f"{facts['engine']}: {facts['verdict']}"]
    for one in facts["options"]:
        if one["possible"]:
            gain = one["gain"]
            brings = f": {gain['tokens']:,} tokens more" if gain["tokens"] else ""
            brings += f", {gain['sequences']:,} sequences as they run now" if gain["sequences"] else ""
            lines += [f"  {one['title']}: {one['change']}{brings}", f"     {one['arithmetic']}"]
            lines.append(f"     quality: {one['quality']}" + (f"; price: {one['price']}" if one["price"] else ""))
            flags = "; ".join(f"{engine}: {text}" for engine, text in one["flags"].items() if text)
            lines.append(f"     {flags or 'no engine has a flag for it'}")
    lines.append("ruled out:")
    lines += [f"  {one['title']}: {one['why_not']}" for one in facts["options"] if not one["possible"]]
    if facts["planned"] is not None:
        lines.append(f"by the model's config: {facts['planned']['words']}")
        if not facts["planned"]["agrees"]:
            lines.append("  they differ, so no more is said by it: is it the config of this model?")
        for one in facts["planned_options"]:
            if one["possible"]:
                lines.append(f"  {one['title']}: {one['change']}: {one['arithmetic']}")
    return "\n".join(lines)


def _gib(count: float) -> str:
    return f"{count / (1 << 30):.2f} GiB"
