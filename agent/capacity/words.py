"""A plan as JSON and as text: every number with the sum that it comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from agent.capacity.advisor import Option
from agent.capacity.counts import model_bytes
from agent.capacity.geometry import AttentionCache, Cache, CacheKind, ModelGeometry, StateCache
from agent.capacity.planner import Plan
from agent.capacity.together import Together

SCHEMA = "kvatlas.plan/v1"
GIB = 1 << 30


def attention_of(geometry: ModelGeometry) -> str:
    """The kinds of attention in a few words, as "GQA + sliding window 4096 (21 of 42 layers)"."""
    if geometry.no_cache_reason is not None:
        return "encoder only"
    parts: list[str] = []
    caches = geometry.attention_caches
    plain = [cache for cache in caches if not cache.replicated and cache.kind is not CacheKind.CROSS]
    if plain:
        heads = {cache.kv_heads for cache in plain}
        if heads == {geometry.attention_heads}:
            parts.append("MHA")
        else:
            parts.append("MQA" if heads == {1} else "GQA")
    kinds = Counter(cache.kind for cache in caches)
    total = len(geometry.layers)
    if kinds[CacheKind.MLA]:
        parts.append("MLA")
    for kind, name in ((CacheKind.SLIDING, "sliding window"), (CacheKind.CHUNKED, "chunks")):
        windows = sorted({cache.window for cache in caches if cache.kind is kind and cache.window})
        if windows:
            parts.append(f"{name} {', '.join(map(str, windows))} ({kinds[kind]} of {total} layers)")
    if kinds[CacheKind.INDEXER]:
        parts.append("indexer")
    if kinds[CacheKind.CROSS]:
        parts.append(f"cross-attention ({kinds[CacheKind.CROSS]} layers)")
    states = geometry.state_caches
    if states:
        parts.append(f"{states[0].family} state ({len(states)} of {total} layers)")
    return " + ".join(parts) or "none"


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan under the keys that scripts may rely on, and more beside them."""
    geometry, deployment, memory, pool = plan.geometry, plan.deployment, plan.memory, plan.pool
    nothing = geometry.no_cache_reason is not None
    return {
        "schema": SCHEMA,
        "model": geometry.name,
        "model_type": geometry.model_type,
        "attention": attention_of(geometry),
        "kv_bytes_per_token": None if nothing else plan.kv_bytes_per_token,
        "kv_bytes_per_token_ideal": None if nothing else plan.kv_bytes_per_token_ideal,
        "kv_bytes_per_block": None if nothing else plan.kv_bytes_per_block,
        "state_bytes_per_sequence": None if nothing else plan.state_bytes_per_sequence,
        "cross_attention_bytes_per_sequence": None if nothing else plan.cross_bytes_per_sequence,
        "block_size": plan.layout.block_tokens,
        "groups": [
            {"kind": group.kind, "window": group.window, "block_size": group.block_tokens, "layers": len(group.pages)}
            for group in plan.layout.groups
        ],
        "max_model_len": plan.max_model_len,
        "max_num_seqs": deployment.max_num_seqs,
        "tensor_parallel": deployment.tp,
        "pipeline_parallel": deployment.pp,
        "data_parallel": deployment.dp,
        "gpus": deployment.gpus,
        "gpu": deployment.gpu.name if deployment.gpu else None,
        "kv_dtype": plan.kv.name,
        "weight_dtype": plan.weights.name,
        "weight_bytes": plan.weighing.total if plan.weighing.source != "guessed" else None,
        "parameters": geometry.parameters,
        "memory": None
        if memory is None
        else {
            "total_bytes": memory.total_bytes,
            "budget_bytes": memory.budget_bytes,
            "co_tenant_bytes": memory.co_tenant_bytes,
            "weights_bytes": memory.weights_bytes,
            "weights_source": memory.weights_source,
            "activation_bytes": memory.activation_bytes,
            "other_bytes": memory.other_bytes,
            "pool_bytes": memory.pool_bytes,
            "deficit_bytes": memory.deficit_bytes,
        },
        "num_blocks": pool.num_blocks if pool else None,
        "usable_blocks": pool.usable_blocks if pool else None,
        "headroom_blocks": pool.headroom_blocks if pool else None,
        "pool_tokens": pool.pool_tokens if pool else None,
        "longest_sequence_tokens": pool.longest_sequence_tokens if pool else None,
        "max_concurrent_sequences": plan.max_concurrent_sequences,
        "per_sequence": None
        if nothing
        else {
            "reserve_blocks": plan.reserve_blocks_per_sequence,
            "engine_blocks": plan.engine_blocks_per_sequence,
            "reserve_bytes": plan.reserve_bytes_per_sequence,
            "ideal_bytes": plan.ideal_bytes_per_sequence,
        },
        "concurrency": None
        if pool is None
        else {
            "reserve": pool.reserve_sequences,
            "engine": round(pool.engine_sequences, 4),
            "ideal": pool.ideal_sequences,
        },
        "fits": plan.fits,
        "shortfall_bytes": pool.shortfall_bytes if pool else None,
        "verdict": plan.verdict,
        "confidence": plan.confidence,
        "warnings": list(plan.warnings),
        "notes": [*(text for text in (geometry.dtype_note,) if text), *geometry.notes, *plan.layout.notes],
        "arithmetic": list(arithmetic(plan)),
    }


def refusal(model: str, reason: str) -> dict[str, Any]:
    """The answer for a layout that is not known: no number at all."""
    empty = ("attention", "kv_bytes_per_token", "kv_bytes_per_token_ideal", "kv_bytes_per_block",
             "state_bytes_per_sequence", "memory", "num_blocks", "pool_tokens", "max_concurrent_sequences",
             "fits")  # fmt: skip
    return {
        "schema": SCHEMA,
        "model": model,
        **dict.fromkeys(empty),
        "verdict": f"refused: {reason}",
        "confidence": "refused",
        "warnings": [reason],
        "arithmetic": [],
    }


def arithmetic(plan: Plan) -> tuple[str, ...]:
    """The sums behind the plan, one a line."""
    geometry = plan.geometry
    if geometry.no_cache_reason is not None:
        return (geometry.no_cache_reason,)
    lines = [*_token_lines(plan)]
    lines.append(
        f"KV a token{_on_gpu(plan)}: {plan.kv_bytes_per_token:,} B as reserved"
        + (
            f", {plan.kv_bytes_per_token_ideal:,} B once the windows are full"
            if plan.kv_bytes_per_token != plan.kv_bytes_per_token_ideal
            else ""
        )
    )
    lines += [*_state_lines(plan), *_cross_lines(plan)]
    lines.append(_block_line(plan))
    lines.append(_sequence_line(plan))
    if plan.memory is not None and plan.pool is not None:
        lines.extend(_memory_lines(plan))
    lines.append(plan.verdict)
    return tuple(lines)


def _state_lines(plan: Plan) -> list[str]:
    """Of the pipeline stage whose states take most."""
    tp = plan.deployment.tp

    def words(state: StateCache) -> tuple[str, int]:
        forced, plain = plan.deployment.state_float32, model_bytes(plan.geometry)
        if forced is not None:
            state = replace(state, state_dtype="float32" if forced else "model")
        tensors = [(one, 4 if one.dtype == "float32" else plain) for one in state.tensors(tp)]
        text = " + ".join(f"{one.name} {' × '.join(map(str, one.shape))} × {size} B" for one, size in tensors)
        return text, sum(one.elements * size for one, size in tensors)

    stages = (_count(plan, stage, lambda cache: isinstance(cache, StateCache)) for stage in plan.layout.stages)
    sums = [
        [(layers, *words(state)) for state, layers in stage.items() if isinstance(state, StateCache)]
        for stage in stages
    ]
    most = max(sums, key=lambda found: sum(layers * size for layers, _, size in found), default=[])
    if not most:
        return []
    parts = " + ".join(f"{layers} layers × ({text})" for layers, text, _ in most)
    return [f"state a sequence: {parts} = {plan.state_bytes_per_sequence:,} B{_on_gpu(plan)}"]


def _cross_lines(plan: Plan) -> list[str]:
    """Of the pipeline stage whose cross-attention takes most."""
    if not plan.cross_bytes_per_sequence:
        return []
    kv, tp, tokens = plan.kv, plan.deployment.tp, plan.geometry.encoder_tokens
    stages = [
        [
            (layers, cache)
            for cache, layers in _count(plan, stage, lambda cache: _crosses(cache)).items()
            if isinstance(cache, AttentionCache)
        ]
        for stage in plan.layout.stages
    ]
    most = max(stages, key=lambda found: sum(layers * kv.of_token(cache, tp) for layers, cache in found))
    parts = " + ".join(f"{layers} layers × {kv.words(cache, tp)}" for layers, cache in most)
    parts = f"({parts})" if len(most) > 1 else parts
    total = f"{plan.cross_bytes_per_sequence:,} B{_on_gpu(plan)}"
    return [f"cross-attention a sequence: {tokens:,} encoder tokens × {parts} = {total}"]


def _crosses(cache: Cache) -> bool:
    return isinstance(cache, AttentionCache) and cache.kind is CacheKind.CROSS


def _count(plan: Plan, stage: range, wanted: Callable[[Cache], bool]) -> Counter[Cache]:
    return Counter(cache for index in stage for cache in plan.geometry.layers[index] if wanted(cache))


def _on_gpu(plan: Plan) -> str:
    return f" on one of {plan.deployment.gpus} GPUs" if plan.deployment.gpus > 1 else ""


def _token_lines(plan: Plan) -> list[str]:
    """Layers of one kind together, of the pipeline stage that holds most."""
    tp, kv = plan.deployment.tp, plan.kv
    stage = max(plan.layout.stages, key=lambda one: sum(_token(plan, index) for index in one), default=range(0))
    groups: Counter[AttentionCache] = Counter(
        cache
        for index in stage
        for cache in plan.geometry.layers[index]
        if isinstance(cache, AttentionCache) and cache.kind is not CacheKind.CROSS
    )
    lines = []
    for cache, layers in groups.items():
        limit = f", of the last {cache.window:,} tokens alone" if cache.window is not None else ""
        total = layers * kv.of_token(cache, tp)
        lines.append(f"{cache.kind.value}: {layers} layers × {kv.words(cache, tp)} = {total:,} B a token{limit}")
    return lines


def _token(plan: Plan, index: int) -> int:
    return sum(
        plan.kv.of_token(cache, plan.deployment.tp)
        for cache in plan.geometry.layers[index]
        if isinstance(cache, AttentionCache) and cache.kind is not CacheKind.CROSS
    )


def _block_line(plan: Plan) -> str:
    groups = plan.layout.groups
    if not groups:
        return "no layer keeps anything: there are no blocks"
    if len(groups) == 1:
        return f"a block: {plan.layout.block_tokens} tokens, {plan.kv_bytes_per_block:,} B"
    stage = max(plan.layout.stages, key=lambda one: max(group.block_bytes(one) for group in groups))
    largest = max(groups, key=lambda group: group.block_bytes(stage))
    pages = [page for page in largest.pages if page.layer in stage]  # all of one size, since they share a pool
    return (
        f"a block: {len(groups)} groups of layers share one pool; a block of one group holds "
        f"{len(pages)} layers × {pages[0].page_bytes:,} B = {plan.kv_bytes_per_block:,} B{_on_gpu(plan)}"
    )


def _sequence_line(plan: Plan) -> str:
    text = (
        f"one sequence of {plan.max_model_len:,} tokens: {plan.reserve_blocks_per_sequence:,} blocks with every layer "
        f"whole"
    )
    if plan.engine_blocks_per_sequence != plan.reserve_blocks_per_sequence:
        text += f", {plan.engine_blocks_per_sequence:,} as vLLM's hybrid manager admits it"
    return text + f"; what it has to keep is {_gib(plan.ideal_bytes_per_sequence)}"


def _memory_lines(plan: Plan) -> list[str]:
    memory, pool, deployment = plan.memory, plan.pool, plan.deployment
    if memory is None or pool is None:
        return []
    lines = [plan.weighing.words]
    if deployment.tp * deployment.pp > 1:
        lines.append(f"weights on the fullest GPU (÷ {deployment.tp} ranks, its stage of {deployment.pp}): "
                     f"{_gib(memory.weights_bytes)}")  # fmt: skip
    if deployment.kv_cache_bytes is not None:
        lines.append(f"pool: {_gib(memory.pool_bytes)} as given")
    else:
        lines.append(plan.activation_words)
        total, budget = memory.total_bytes or 0, memory.budget_bytes or 0
        share = f"{_gib(total)} × {deployment.utilization:g} = {_gib(budget)}"
        if total - memory.co_tenant_bytes < budget:
            free = total - memory.co_tenant_bytes
            share += f", of which {_gib(total)} - {_gib(memory.co_tenant_bytes)} of others = {_gib(free)} are free"
        lines.append(
            f"pool: {share}, less weights {_gib(memory.weights_bytes)}, activations {_gib(memory.activation_bytes)} "
            f"and the rest {_gib(memory.other_bytes)} = {_gib(memory.pool_bytes - memory.deficit_bytes)}"
        )
    lines.append(
        f"blocks: {memory.pool_bytes:,} / {memory.block_bytes:,} = {pool.num_blocks:,}, of which 1 is reserved"
        + (f" and {pool.headroom_blocks:,} are headroom" if pool.headroom_blocks else "")
        + f"; {pool.pool_tokens:,} tokens"
    )
    return lines


def render(plan: Plan) -> str:
    """The plan for people."""
    geometry = plan.geometry
    lines = [f"{geometry.name}: {attention_of(geometry)}; confidence {plan.confidence}"]
    lines += [f"  {line}" for line in arithmetic(plan)]
    if plan.pool is not None:
        lines.append(
            f"  at once: {plan.pool.reserve_sequences:,} sequences of {plan.max_model_len:,} tokens by the reserve, "
            f"{plan.pool.engine_sequences:,.1f} by vLLM's hybrid manager, {plan.pool.ideal_sequences:,} ideally"
        )
    notes = [text for text in (geometry.dtype_note, *geometry.notes, *plan.layout.notes) if text]
    lines += [f"  note: {note}" for note in notes]
    lines += [f"  warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines)


def render_advice(
    options: tuple[Option, ...], together: Together | None = None, *, fits_already: bool | None = False
) -> str:
    """The options for people, best first, and which make it fit together; `fits_already` as the plan says."""
    lines = []
    if together is not None:
        lines = [f"together: {', '.join(together.changes)}, on {together.gpus} GPUs", f"  {together.verdict}"]
    lines.append("what to change, best first:")
    number = 0
    for option in options:
        if option.why_not is not None:
            continue
        number += 1
        fits = {True: "" if fits_already else "; fits then", False: "; does not fit yet", None: ""}[option.fits]
        lines.append(f"  {number}. {option.recipe.title}: {option.change}{fits}")
        lines.append(f"     {option.arithmetic}")
        lines.append(f"     quality: {option.recipe.quality} ({option.recipe.source})")
        if option.recipe.price:
            lines.append(f"     price: {option.recipe.price}")
        flags = "; ".join(f"{engine}: {text}" for engine, text in option.recipe.flags.items() if text)
        lines.append(f"     {flags or 'no engine has a flag for it'}")
    lines.append("ruled out:")
    lines += [f"  {one.recipe.title}: {one.why_not}" for one in options if one.why_not is not None]
    return "\n".join(lines)


def _gib(count: float) -> str:
    return f"{count / GIB:.2f} GiB"
