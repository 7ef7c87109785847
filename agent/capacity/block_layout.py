"""How vLLM 0.32 cuts a model's caches into blocks: groups of layers that share one pool, and the bytes of one block.

The rules are those of vllm/v1/core/kv_cache_utils.py (get_kv_cache_groups, unify_kv_cache_spec_page_size,
_get_kv_cache_groups_uniform_page_size, get_kv_cache_config_from_groups) for layouts with the layer outermost, which is
what its attention backends on GPUs and CPUs ask for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from agent.capacity.formats import KvFormat
from agent.capacity.geometry import AttentionCache, Cache, CacheKind, ModelGeometry

MLA_ALIGNMENT = 128  # tokens: vLLM keeps blocks of latent caches beside states a multiple of this
SPREAD = 1.5  # above this ratio of layer counts, groups are as small as the smallest kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What one layer's cache takes in one block. `kind` is a CacheKind's value or "state"; pages of one `shape` and
    block length may share a group."""

    layer: int
    kind: str
    shape: tuple[int, ...]
    window: int | None
    block_tokens: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one block table. Each of its blocks holds `block_tokens` tokens of every layer in it."""

    kind: str
    window: int | None
    block_tokens: int
    pages: tuple[Page, ...]

    def block_bytes(self, layers: range) -> int:
        """Bytes of one block for those of its layers that lie on one pipeline stage."""
        return sum(page.page_bytes for page in self.pages if page.layer in layers)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Groups of the whole model, layers of each pipeline stage, and what a block takes on each stage's GPUs."""

    groups: tuple[Group, ...]
    stages: tuple[range, ...]
    stage_block_bytes: tuple[int, ...]
    block_tokens: int
    state_blocks: int
    notes: tuple[str, ...]

    @property
    def block_bytes(self) -> int:
        """Of the stage that needs most, which decides how many blocks fit."""
        return max(self.stage_block_bytes, default=0)

    def blocks_for(self, tokens: int, *, keep_all: bool, in_flight: int, encoder_tokens: int) -> int:
        """Blocks that one sequence of `tokens` tokens takes.

        `keep_all` counts windowed layers as full ones, as an engine without a hybrid cache manager keeps them; without
        it a window holds its tokens and the `in_flight` ones of a step, as vLLM's admission does
        (max_admission_blocks_per_request).
        """
        return sum(self._blocks_of(group, tokens, keep_all, in_flight, encoder_tokens) for group in self.groups)

    def _blocks_of(self, group: Group, tokens: int, keep_all: bool, in_flight: int, encoder_tokens: int) -> int:
        if group.kind == "state":
            return self.state_blocks
        if group.kind == CacheKind.CROSS.value:
            return ceil(encoder_tokens / group.block_tokens)
        whole = ceil(tokens / group.block_tokens)
        if keep_all or group.window is None:
            return whole
        if group.kind == CacheKind.CHUNKED.value:
            return ceil(min(group.window + in_flight, tokens) / group.block_tokens)
        # One block more, since a window may begin and end within blocks.
        return ceil(min(group.window - 1 + in_flight, tokens) / group.block_tokens) + 1


def stage_layers(layers: int, pp: int) -> tuple[range, ...]:
    """Layers of each pipeline stage, split as vLLM's get_pp_indices does: the rest to the last but one, and on."""
    counts = [layers // pp] * pp
    for index in range(2, layers % pp + 2):
        counts[-index] += 1
    starts = [sum(counts[:stage]) for stage in range(pp)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def lay_out(
    geometry: ModelGeometry,
    kv: KvFormat,
    *,
    tp: int,
    pp: int,
    block_tokens: int,
    model_bytes: int,
    max_model_len: int,
    hybrid_manager: bool,
    prefix_cache: bool,
    state_float32: bool | None = None,
) -> BlockLayout:
    """Groups and bytes per block of a model on `tp` × `pp` GPUs.

    `state_float32` overrides the states' dtype; None keeps what the model's family does.
    """
    notes: list[str] = []
    pages = _pages(geometry, kv, tp, block_tokens, model_bytes, max_model_len, state_float32, notes)
    kinds = {page.kind for page in pages}
    windowed = {CacheKind.SLIDING.value, CacheKind.CHUNKED.value}
    if CacheKind.FULL.value in kinds and kinds & windowed and not hybrid_manager:
        pages = [_promoted(page) for page in pages]
        notes.append("the hybrid cache manager is off: windowed layers are kept whole")
    groups = _groups(pages, notes)
    stages = stage_layers(len(geometry.layers), pp)
    sizes = tuple(max((group.block_bytes(stage) for group in groups), default=0) for stage in stages)
    attention = [group.block_tokens for group in groups if group.kind != "state"]
    return BlockLayout(
        groups=groups,
        stages=stages,
        stage_block_bytes=sizes,
        block_tokens=min(attention, default=max_model_len),
        state_blocks=_state_blocks(geometry, prefix_cache and bool(attention)),
        notes=tuple(notes),
    )


def _state_blocks(geometry: ModelGeometry, prefix_cache: bool) -> int:
    """Blocks that hold the states of one sequence in each group.

    Beside a prefix cache vLLM keeps the state of the block before as well, and mamba2's at a checkpoint in the prompt
    (MambaSpec.max_memory_usage_bytes); models of states alone have no prefix cache unless asked.
    """
    if not prefix_cache:
        return 1
    return 3 if any(cache.family == "mamba2" for cache in geometry.state_caches) else 2


def _pages(
    geometry: ModelGeometry,
    kv: KvFormat,
    tp: int,
    block_tokens: int,
    model_bytes: int,
    max_model_len: int,
    state_float32: bool | None,
    notes: list[str],
) -> list[Page]:
    def state_bytes(cache: Cache) -> int:
        if isinstance(cache, AttentionCache):
            return 0
        kept = cache if state_float32 is None else replace(cache, state_dtype="float32" if state_float32 else "model")
        return kept.bytes_on_rank(tp, model_bytes)

    attention, states = geometry.attention_caches, geometry.state_caches
    state_page = max(map(state_bytes, states), default=0)
    if states and attention:
        token = kv.of_token(attention[0], tp)
        align = max(block_tokens, MLA_ALIGNMENT if attention[0].kind is CacheKind.MLA else 1)
        needed = align * ceil(state_page / (align * token))
        if needed > block_tokens:
            notes.append(
                f"a block has {needed} tokens instead of {block_tokens}: its {token} B a token and layer must hold a "
                f"state of {state_page} B (≥ {state_page / token:.1f} tokens, a multiple of {align})"
            )
            block_tokens = needed
        state_page = block_tokens * token
    pages = []
    for index, layer in enumerate(geometry.layers):
        for cache in layer:
            if isinstance(cache, AttentionCache):
                heads = cache.heads_on_rank(tp)
                pages.append(
                    Page(
                        layer=index,
                        kind=cache.kind.value,
                        shape=(heads, cache.key_dim, cache.value_dim),
                        window=cache.window,
                        block_tokens=block_tokens,
                        page_bytes=block_tokens * kv.of_token(cache, tp),
                    )
                )
            else:
                # Alone, a state's block spans the longest sequence; beside attention it is as large as attention's.
                length = block_tokens if attention else max_model_len
                pages.append(
                    Page(layer=index, kind="state", shape=(), window=None, block_tokens=length, page_bytes=state_page)
                )
    return pages


def _promoted(page: Page) -> Page:
    if page.kind in (CacheKind.SLIDING.value, CacheKind.CHUNKED.value):
        return replace(page, kind=CacheKind.FULL.value, window=None)
    return page


def _groups(pages: Sequence[Page], notes: list[str]) -> tuple[Group, ...]:
    if not pages:
        return ()
    everything_lasts = {CacheKind.FULL.value, CacheKind.MLA.value, CacheKind.INDEXER.value}
    lengths = {page.block_tokens for page in pages}
    alike = len({(page.kind, page.window) for page in pages}) == 1 or all(
        page.kind in everything_lasts for page in pages
    )
    if alike and len(lengths) == 1:
        return (_group(pages),)
    return _equal_groups(_equal_pages(pages, notes))


def _group(pages: Sequence[Page]) -> Group:
    kind = CacheKind.MLA.value if any(page.kind == CacheKind.MLA.value for page in pages) else pages[0].kind
    return Group(kind, pages[0].window, pages[0].block_tokens, tuple(pages))


def _equal_pages(pages: Sequence[Page], notes: list[str]) -> list[Page]:
    """Pages of one size: smaller ones take more tokens into a block where that comes out even, else they are padded."""
    largest = max(page.page_bytes for page in pages)
    equal = []
    for page in pages:
        if page.page_bytes == largest:
            equal.append(page)
        elif page.kind != "state" and largest % page.page_bytes == 0:
            ratio = largest // page.page_bytes
            equal.append(replace(page, block_tokens=page.block_tokens * ratio, page_bytes=largest))
        else:
            equal.append(replace(page, page_bytes=largest))
            padded = f"pages of {page.kind} layers are padded from {page.page_bytes} to {largest} B to share the pool"
            if padded not in notes:
                notes.append(padded)
    return equal


def _equal_groups(pages: Sequence[Page]) -> tuple[Group, ...]:
    """Groups of equally many layers: as many as the rarest kind has, or the commonest where they are close."""
    buckets: defaultdict[tuple[object, ...], list[Page]] = defaultdict(list)
    for page in pages:
        buckets[(page.kind, page.window, page.shape, page.block_tokens)].append(page)
    sizes = [len(bucket) for bucket in buckets.values()]
    size = max(sizes) if max(sizes) < min(sizes) * SPREAD else min(sizes)
    groups: list[Group] = []
    for bucket in buckets.values():
        parts = ceil(len(bucket) / size)
        groups.extend(_group(bucket[part::parts]) for part in range(parts))
    return tuple(groups)
