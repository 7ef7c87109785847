"""The capacity planner: what a model keeps for each token and sequence, what fits on given GPUs, and by how much not.

Pure: a geometry and a deployment in, a frozen plan out. Every number is of one GPU, the one that holds most, unless its
name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.capacity.block_layout import BlockLayout, lay_out
from agent.capacity.counts import Counts, model_bytes
from agent.capacity.deployment import FALLBACK_LENGTH, MAX_TOKENS, Deployment
from agent.capacity.formats import KvFormat, WeightFormat, kv_format, weight_format
from agent.capacity.geometry import CacheKind, Confidence, ModelGeometry, weakest
from agent.capacity.memory import OTHER_BYTES, UNKNOWN_BYTES, Weights, activations, stage_shares, weigh

ABSURD_LENGTH = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one GPU of the stage that has least room. `pool_bytes` is what is left for the KV pool, never below 0;
    `deficit_bytes` is what is missing where weights and the rest alone are too much."""

    total_bytes: int | None
    budget_bytes: int | None
    co_tenant_bytes: int
    weights_bytes: int
    weights_source: str
    activation_bytes: int
    other_bytes: int
    pool_bytes: int
    deficit_bytes: int
    block_bytes: int  # of one block on that stage


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The pool in blocks. `reserve`, `engine` and `ideal` are three ways to count one sequence of the longest length:
    every layer whole; as vLLM's hybrid cache manager admits it; and what it really has to keep."""

    num_blocks: int
    headroom_blocks: int
    usable_blocks: int
    pool_tokens: int
    longest_sequence_tokens: int
    reserve_sequences: int
    engine_sequences: float
    ideal_sequences: int
    shortfall_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. `fits` is None where no GPU was named, or where guessed weights leave it open."""

    geometry: ModelGeometry
    deployment: Deployment
    kv: KvFormat
    weights: WeightFormat
    layout: BlockLayout
    max_model_len: int
    kv_bytes_per_token: int
    kv_bytes_per_token_ideal: int
    state_bytes_per_sequence: int
    cross_bytes_per_sequence: int
    reserve_blocks_per_sequence: int
    engine_blocks_per_sequence: int
    ideal_bytes_per_sequence: int
    memory: MemoryPlan | None
    pool: PoolPlan | None
    fits: bool | None
    verdict: str
    confidence: Confidence
    warnings: tuple[str, ...]
    weighing: Weights
    activation_words: str

    @property
    def kv_bytes_per_block(self) -> int:
        """Of the stage that needs most."""
        return self.layout.block_bytes

    @property
    def reserve_bytes_per_sequence(self) -> int:
        """Bytes of the blocks that a sequence of the longest length takes with every layer whole."""
        return self.reserve_blocks_per_sequence * self.layout.block_bytes

    @property
    def blocks_needed(self) -> int:
        """Blocks that the verdict counts for one sequence: the larger of the two ways engines reserve them."""
        return max(self.reserve_blocks_per_sequence, self.engine_blocks_per_sequence)

    @property
    def max_concurrent_sequences(self) -> int | None:
        """Sequences of the longest length at once, in the whole deployment."""
        return None if self.pool is None else self.pool.reserve_sequences * self.deployment.dp


def plan(geometry: ModelGeometry, deployment: Deployment) -> Plan:
    """Plan a deployment. SettingsError where its settings contradict the model or each other."""
    deployment.check(geometry)
    warnings = list(geometry.warnings)
    kv = _kv(geometry, deployment, warnings)
    weights = weight_format(geometry.weight_format if deployment.weight_dtype == "auto" else deployment.weight_dtype)
    length = _length(geometry, deployment, warnings)
    layout = lay_out(
        geometry,
        kv,
        tp=deployment.tp,
        pp=deployment.pp,
        block_tokens=deployment.block_tokens,
        model_bytes=model_bytes(geometry),
        max_model_len=length,
        hybrid_manager=deployment.hybrid_manager,
        prefix_cache=deployment.prefix_cache,
        state_float32=deployment.state_float32,
    )
    counts = Counts(geometry, deployment, kv, layout)
    per_block = layout.block_tokens
    reserve, engine = (
        layout.blocks_for(
            length,
            keep_all=keep_all,
            in_flight=deployment.max_batched_tokens,
            encoder_tokens=geometry.encoder_tokens,
        )
        for keep_all in (True, False)
    )
    weighing = weigh(geometry, deployment, weights)
    _warn_of_replicas(geometry, deployment, warnings)
    activation, activation_words = activations(geometry, deployment)
    confidence = geometry.confidence
    memory = pool = None
    fits, verdict = None, "no GPU was named: give --gpu or --gpu-memory to see what fits"
    if geometry.no_cache_reason is not None:
        verdict = geometry.no_cache_reason
    elif deployment.total_bytes is not None or deployment.kv_cache_bytes is not None:
        sums = _Sums(geometry, deployment, layout, counts, length, max(reserve, engine), engine, activation, weights)
        memory, pool = sums.at(weighing.total, weighing.source)
        fits, verdict = sums.judge(memory, pool)
        if weighing.source == "guessed":
            confidence = weakest(confidence, "medium")
            warnings.append(weighing.words)
            answers = {sums.judge(*sums.at(one, weighing.source))[0] for one in (weighing.least, weighing.most)}
            if len(answers) > 1:
                fits, verdict = None, "it depends on the weights, which are not known: give --weights-memory"
            if weighing.most == UNKNOWN_BYTES and deployment.kv_cache_bytes is None:
                memory = pool = None  # a number of blocks would be no better than a guess without a bound
                if fits is False:
                    least = sums.judge(*sums.at(weighing.least, weighing.source))[1]
                    verdict = f"with {_gib(weighing.least)} of weights, the least that they may be: {least}"
        if deployment.gpu is not None and deployment.memory_bytes is None and deployment.gpu.estimated:
            warnings.append(f"{deployment.gpu.name}'s memory is estimated from the driver's total: give --gpu-memory")
        if memory is not None:
            _warn_of_memory(deployment, memory, warnings)
        if per_block != deployment.block_tokens and deployment.kv_cache_bytes is None:
            warnings.append(f"the engine raises the block size from {deployment.block_tokens} to {per_block} tokens")
    return Plan(
        geometry=geometry,
        deployment=deployment,
        kv=kv,
        weights=weights,
        layout=layout,
        max_model_len=length,
        kv_bytes_per_token=counts.per_token(windowed=True),
        kv_bytes_per_token_ideal=counts.per_token(windowed=False),
        state_bytes_per_sequence=counts.states(),
        cross_bytes_per_sequence=counts.cross(),
        reserve_blocks_per_sequence=reserve,
        engine_blocks_per_sequence=engine,
        ideal_bytes_per_sequence=counts.ideal(length),
        memory=memory,
        pool=pool,
        fits=fits,
        verdict=verdict,
        confidence=confidence,
        warnings=tuple(dict.fromkeys(warnings)),
        weighing=weighing,
        activation_words=activation_words,
    )


class _Sums:
    """Memory and pool for given weights: asked more than once where those had to be guessed."""

    def __init__(
        self,
        geometry: ModelGeometry,
        deployment: Deployment,
        layout: BlockLayout,
        counts: Counts,
        length: int,
        needed: int,
        engine: int,
        activation: int,
        weights: WeightFormat,
    ) -> None:
        self._geometry, self._deployment, self._layout, self._counts = geometry, deployment, layout, counts
        self._length, self._needed, self._engine, self._activation = length, needed, engine, activation
        self._weights = weights

    def at(self, weights: int, source: str) -> tuple[MemoryPlan, PoolPlan]:
        """The stage with least room decides how many blocks there are."""
        deployment, total = self._deployment, self._deployment.total_bytes
        budget = None if total is None else int(total * deployment.utilization)
        other = OTHER_BYTES if deployment.other_bytes is None else deployment.other_bytes
        shares = stage_shares(self._geometry, self._layout.stages, weights, self._weights)
        found: list[tuple[int, MemoryPlan]] = []
        for share, block in zip(shares, self._layout.stage_block_bytes, strict=True):
            mine = -(-share // deployment.tp)
            if deployment.kv_cache_bytes is not None:
                left = deployment.kv_cache_bytes
            else:
                room = min(budget or 0, (total or 0) - deployment.co_tenant_bytes)
                left = room - mine - self._activation - other
            memory = MemoryPlan(
                total, budget, deployment.co_tenant_bytes, mine, source, self._activation, other, max(0, left),
                max(0, -left), block,
            )  # fmt: skip
            found.append((memory.pool_bytes // block if block else 0, memory))
        blocks, memory = min(found, key=lambda one: (one[0], -one[1].deficit_bytes))
        return memory, self._pool(blocks, memory)

    def _pool(self, blocks: int, memory: MemoryPlan) -> PoolPlan:
        headroom = int(blocks * self._deployment.headroom)
        usable = max(0, blocks - 1 - headroom)  # vLLM keeps block 0 for padding
        need, block = self._needed, memory.block_bytes
        wanted = -(-(self._deployment.max_num_seqs or 1) // self._deployment.dp)
        one_group = len(self._layout.groups) == 1 and self._layout.groups[0].kind != "state"
        tokens = blocks * self._layout.block_tokens if one_group else int(blocks / need * self._length) if need else 0
        missing = max(0, need * wanted - usable)
        ideal = self._counts.ideal(self._length)
        return PoolPlan(
            num_blocks=blocks,
            headroom_blocks=headroom,
            usable_blocks=usable,
            pool_tokens=tokens,
            longest_sequence_tokens=self._longest(usable),
            reserve_sequences=usable // need if need else 0,
            engine_sequences=blocks / self._engine if self._engine else 0.0,
            ideal_sequences=memory.pool_bytes // ideal if ideal else 0,
            shortfall_bytes=max(memory.deficit_bytes + missing * block, self._not_free(memory)),
        )

    def _longest(self, usable: int) -> int:
        """The longest sequence whose blocks fit alone, by bisection: growth is no straight line with windows."""
        low, high = 0, max(self._length, 1)
        if self._blocks(MAX_TOKENS) <= usable:
            return high  # states alone: a sequence takes the same at any length
        while self._blocks(high) <= usable:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self._blocks(middle) <= usable:
                low = middle
            else:
                high = middle
        return high if self._blocks(high) <= usable else low

    def _blocks(self, tokens: int) -> int:
        return max(
            self._layout.blocks_for(
                tokens,
                keep_all=keep_all,
                in_flight=self._deployment.max_batched_tokens,
                encoder_tokens=self._geometry.encoder_tokens,
            )
            for keep_all in (True, False)
        )

    def _not_free(self, memory: MemoryPlan) -> int:
        """Bytes of the GPU that the engine asks for at its start and that are not free."""
        if memory.total_bytes is None:
            return 0
        asked = memory.budget_bytes or 0
        if self._deployment.kv_cache_bytes is not None:
            asked = memory.weights_bytes + memory.activation_bytes + memory.other_bytes + memory.pool_bytes
        return max(0, asked - (memory.total_bytes - memory.co_tenant_bytes))

    def judge(self, memory: MemoryPlan, pool: PoolPlan) -> tuple[bool, str]:
        """Whether what was asked for fits, and in words by how much (not)."""
        deployment, over = self._deployment, self._not_free(memory)
        if over and deployment.kv_cache_bytes is None:
            total = memory.total_bytes or 0
            free = max(0, total - memory.co_tenant_bytes)
            share = int(free / total * 100) / 100 if total else 0.0
            remedy = f"use --gpu-memory-utilization {share:g} or less" if share else "stop one of those"
            return False, (
                f"does not start: {_gib(memory.budget_bytes or 0)} are asked for and {_gib(free)} are free beside "
                f"other processes; {remedy}"
            )
        if over:
            return False, f"does not fit: the pool and all else are {_gib(over)} more than the GPU has free"
        if memory.deficit_bytes:
            return False, f"does not fit: weights and the rest alone are {_gib(memory.deficit_bytes)} over the budget"
        wanted = -(-(deployment.max_num_seqs or 1) // deployment.dp)
        what = f"{wanted} × {self._length:,} tokens"
        if pool.shortfall_bytes:
            return False, (
                f"does not fit: {what} take {self._needed * wanted:,} blocks of {pool.usable_blocks:,} usable ones, "
                f"{_gib(pool.shortfall_bytes)} too little on each GPU; the longest sequence that fits alone is "
                f"{pool.longest_sequence_tokens:,} tokens"
            )
        spare = pool.usable_blocks - self._needed * wanted
        return (
            True,
            f"fits: {what} take {self._needed * wanted:,} of {pool.usable_blocks:,} usable blocks, {spare:,} spare",
        )


def _kv(geometry: ModelGeometry, deployment: Deployment, warnings: list[str]) -> KvFormat:
    if deployment.kv_dtype != "auto":
        found = kv_format(deployment.kv_dtype)
    else:
        found = kv_format(geometry.kv_scheme or geometry.dtype)
    kinds = {cache.kind for cache in geometry.attention_caches}
    latent = CacheKind.MLA in kinds
    if found.name == "fp8" and CacheKind.INDEXER in kinds:
        warnings.append("vLLM serves an FP8 cache of sparse latent attention as fp8_ds_mla: 656 B a token and layer")
        return kv_format("fp8_ds_mla")
    if found.name == "fp8_ds_mla" and not latent:
        warnings.append("fp8_ds_mla is a format of latent attention, which this model has not: counted as fp8")
    if latent and found.name in ("int8", "int4", "nvfp4", "fp8_per_token_head"):
        warnings.append(f"vLLM has no {found.name} cache for latent attention: the figure is what it would take")
    return found


def _length(geometry: ModelGeometry, deployment: Deployment, warnings: list[str]) -> int:
    if deployment.max_model_len is not None:
        if geometry.max_position is not None and deployment.max_model_len > geometry.max_position:
            warnings.append(
                f"max-model-len {deployment.max_model_len:,} is more than the {geometry.max_position:,} positions of "
                "the model's config, which engines refuse unless told otherwise"
            )
        return deployment.max_model_len
    if geometry.max_position is None:
        warnings.append(f"the config names no longest length: {FALLBACK_LENGTH:,} is assumed; give --max-model-len")
        return FALLBACK_LENGTH
    if geometry.max_position > ABSURD_LENGTH:
        warnings.append(
            f"the config's longest length is {geometry.max_position:,} tokens, which hardly any request has: engines "
            "check that one such request fits; give --max-model-len"
        )
    return geometry.max_position


def _warn_of_replicas(geometry: ModelGeometry, deployment: Deployment, warnings: list[str]) -> None:
    if deployment.tp == 1:
        return
    if any(cache.replicated for cache in geometry.attention_caches):
        warnings.append(
            f"latent attention is kept whole by each of {deployment.tp} tensor-parallel ranks: more of them add no KV "
            "room; data-parallel attention does (vLLM --data-parallel-size, SGLang --enable-dp-attention)"
        )
    heads = [cache.kv_heads for cache in geometry.attention_caches if not cache.replicated]
    if heads and min(heads) < deployment.tp:
        warnings.append(
            f"{min(heads)} KV heads on {deployment.tp} ranks: each is kept {deployment.tp // min(heads)} times"
        )


def _warn_of_memory(deployment: Deployment, memory: MemoryPlan, warnings: list[str]) -> None:
    if deployment.total_bytes is None and deployment.kv_cache_bytes is not None:
        warnings.append("no GPU was named: only the pool is planned, not whether all else fits beside it")
    elif deployment.kv_cache_bytes is None and deployment.activation_bytes is None and memory.pool_bytes:
        unsure = memory.activation_bytes + memory.other_bytes
        if unsure > memory.pool_bytes // 2:
            warnings.append(
                f"activations and the rest are estimates ({_gib(unsure)}) and large beside the pool: take them from "
                "the engine's own log (--activation-memory, --other-memory)"
            )


def _gib(count: float) -> str:
    return f"{count / (1 << 30):.2f} GiB"
