"""The advisor: what to change where memory is short, ranked, each gain the difference of two plans of this deployment.

Pure. An option that does not apply stays in the list with the reason, so that nobody has to wonder whether it was
thought of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from agent.capacity.deployment import DEFAULT_BLOCK_TOKENS, Deployment
from agent.capacity.engine_flags import RECIPES, Recipe
from agent.capacity.formats import WeightFormat, weight_format
from agent.capacity.geometry import AttentionCache, Cache, CacheKind, ModelGeometry
from agent.capacity.planner import Plan, PoolPlan, plan
from engine_shim.errors import SettingsError

MLA_ELEMENTS = 576
SMALLER_STEP = 2048
MORE_UTILIZATION = 0.95
OFFLOADED_SHARE = 0.25
HOST_BYTES = 64 << 30
ANOTHER_MODEL = 5  # effort
ASKING_FOR_LESS = ("fewer-sequences", "shorter-length")
DIFFICULTY = ("low", "low", "low", "medium", "medium", "high")  # by effort


@dataclass(frozen=True, slots=True)
class Gain:
    """What the option brings, of two plans; negative where it costs. Bytes are of one GPU, sequences and tokens of the
    whole deployment; `sequences` are of the longest length, by the reserve."""

    pool_bytes: int
    tokens: int
    sequences: int
    bytes_per_token: int
    gpus: int

    @property
    def brings_something(self) -> bool:
        """Room, or fewer bytes or GPUs for the same."""
        return max(self.pool_bytes, self.tokens, self.sequences) > 0 or min(self.bytes_per_token, self.gpus) < 0


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that could be changed, and the pool that comes of it.

    `why_not` is set where it is ruled out; then there is neither gain nor outcome.
    """

    key: str
    change: str
    recipe: Recipe
    gain: Gain | None
    fits: bool | None
    why_not: str | None
    arithmetic: str
    outcome: PoolPlan | None = None

    @property
    def possible(self) -> bool:
        """Whether it applies here."""
        return self.why_not is None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        gain = self.gain
        return {
            "option": self.key,
            "title": self.recipe.title,
            "change": self.change,
            "possible": self.possible,
            "why_not": self.why_not,
            "fits": self.fits,
            "gain": None
            if gain is None
            else {
                "pool_bytes": gain.pool_bytes,
                "tokens": gain.tokens,
                "sequences": gain.sequences,
                "kv_bytes_per_token": gain.bytes_per_token,
                "gpus": gain.gpus,
            },
            "after": None
            if self.outcome is None
            else {
                "num_blocks": self.outcome.num_blocks,
                "pool_tokens": self.outcome.pool_tokens,
                "reserve_sequences": self.outcome.reserve_sequences,
                "engine_sequences": round(self.outcome.engine_sequences, 4),
            },
            "arithmetic": self.arithmetic,
            "quality": self.recipe.quality,
            "quality_source": self.recipe.source,
            "price": self.recipe.price,
            "difficulty": DIFFICULTY[self.recipe.effort],
            "flags": self.recipe.flags,
        }


Trial = tuple[str, ModelGeometry, Deployment]


def advise(geometry: ModelGeometry, deployment: Deployment) -> tuple[Option, ...]:
    """Every option, best first.

    Those that apply and gain something come first, and of these another model last; among the others those that make
    what was asked for fit, then those of less effort, then more sequences and tokens. Asking for less counts as no gain
    of its own. SettingsError where no GPU was named, since nothing can be gained of an unknown memory.
    """
    base = plan(geometry, deployment)
    if geometry.no_cache_reason is not None:
        return ()
    if base.pool is None and deployment.total_bytes is not None:
        raise SettingsError("advice needs the weights, which cannot be counted from this config: give --weights-memory")
    if base.pool is None:
        raise SettingsError("advice needs the memory of a GPU: give --gpu, --gpu-memory or --kv-cache-memory")
    options = [_option(base, key, make) for key, make in makers()]
    return tuple(sorted(options, key=lambda one: _rank(base, one)))


def _rank(base: Plan, option: Option) -> tuple[Any, ...]:
    gain = option.gain
    if option.why_not is not None or gain is None:
        return (3, 0, 0, 0, 0, option.key)
    rescues = base.fits is not True and option.fits is True and option.key not in ASKING_FOR_LESS
    if gain.sequences <= 0 and gain.tokens <= 0 and option.fits is not True:
        return (2, 0, 0, 0, 0, option.key)
    another_model = option.recipe.effort >= ANOTHER_MODEL
    return (int(another_model), 0 if rescues else 1, option.recipe.effort, -gain.sequences, -gain.tokens, option.key)


def _option(base: Plan, key: str, make: Callable[[Plan], Trial | str]) -> Option:
    recipe = RECIPES[key]
    change = ""
    try:
        made = make(base)
        if isinstance(made, str):
            return Option(key, "", recipe, None, None, made, "")
        change, geometry, deployment = made
        other = plan(geometry, deployment)
    except SettingsError as error:
        return Option(key, change, recipe, None, None, str(error), "")
    gain, words = _gain(base, other), _words(base, other)
    if not gain.brings_something and other.fits == base.fits:
        return Option(key, change, recipe, None, None, f"{change} brings nothing here: {words}", "")
    return Option(key, change, recipe, gain, other.fits, None, words, other.pool)


def _gain(base: Plan, other: Plan) -> Gain:
    if base.pool is None or other.pool is None or base.memory is None or other.memory is None:
        raise SettingsError("advice needs the memory of a GPU")
    return Gain(
        pool_bytes=(other.memory.pool_bytes - other.memory.deficit_bytes)
        - (base.memory.pool_bytes - base.memory.deficit_bytes),
        tokens=other.pool.pool_tokens * other.deployment.dp - base.pool.pool_tokens * base.deployment.dp,
        sequences=(other.max_concurrent_sequences or 0) - (base.max_concurrent_sequences or 0),
        bytes_per_token=other.kv_bytes_per_token - base.kv_bytes_per_token,
        gpus=other.deployment.gpus - base.deployment.gpus,
    )


def _words(base: Plan, other: Plan) -> str:
    before, after = base.pool, other.pool
    if before is None or after is None:
        return ""
    length = f"{base.max_model_len:,}"
    if base.max_model_len != other.max_model_len:
        length += f" → {other.max_model_len:,}"
    return (
        f"{before.num_blocks:,} blocks of {base.kv_bytes_per_block:,} B → {after.num_blocks:,} of "
        f"{other.kv_bytes_per_block:,} B; {before.pool_tokens:,} → {after.pool_tokens:,} tokens; "
        f"{base.max_concurrent_sequences:,} → {other.max_concurrent_sequences:,} sequences of {length} tokens"
    )


def makers() -> Iterator[tuple[str, Callable[[Plan], Trial | str]]]:
    """For each option what it changes in a plan, or in words why it does not apply."""
    for name in ("fp8", "int8", "int4"):
        yield f"kv-{name}", _kv_maker(name)
        yield f"weights-{name}", _weight_maker("awq-4-g128" if name == "int4" else name)
    yield "shorter-length", _shorter
    yield "fewer-sequences", _fewer_sequences
    yield "fewer-in-flight", _smaller_step
    yield "utilization", _more_utilization
    yield "headroom", _no_headroom
    yield "block-size", _smaller_blocks
    yield "hybrid-manager", _hybrid_manager
    yield "tensor-parallel", _more("tp")
    yield "pipeline-parallel", _more("pp")
    yield "data-parallel", _more("dp")
    yield "weight-offload", _offload_weights
    yield "kv-offload", _offload_cache
    yield "allocation-policy", _allocation_policy
    yield "gqa-model", _grouped_model
    yield "mla-model", _latent_model


def _kv_maker(name: str) -> Callable[[Plan], Trial | str]:
    def make(base: Plan) -> Trial | str:
        if not base.geometry.attention_caches:
            return "the model keeps states and no keys and values"
        latent = any(cache.kind is CacheKind.MLA for cache in base.geometry.attention_caches)
        if latent and name != "fp8":
            return f"no engine has a latent cache in {name.upper()}; FP8 is the one"
        trial = replace(base.deployment, kv_dtype=name)
        if plan(base.geometry, trial).kv_bytes_per_token >= base.kv_bytes_per_token:
            return f"the cache is {base.kv.name} already"
        return f"kv dtype {base.kv.name} → {name}", base.geometry, trial

    return make


def _weight_maker(name: str) -> Callable[[Plan], Trial | str]:
    def make(base: Plan) -> Trial | str:
        fixed = _fixed_pool(base)
        if fixed:
            return fixed
        current, wanted = base.weights, weight_format(name)
        if current.bits <= wanted.bits * 11 / 10:
            return f"the weights are {current.name} already ({float(current.bits):.3g} bits)"
        given = base.deployment.model_weight_bytes
        if given is not None:
            trial = replace(
                base.deployment,
                model_weight_bytes=_requantized(base.geometry, given, current, wanted),
                weight_dtype=name,
            )
        else:
            trial = replace(base.deployment, weight_dtype=name)
        return f"weight dtype {current.name} → {name}", base.geometry, trial

    return make


def _requantized(geometry: ModelGeometry, given: int, current: WeightFormat, wanted: WeightFormat) -> int:
    """Bytes in another format of weights that were given in one: kept + (given - kept) × wanted bits ÷ current bits."""
    kept = min(given, current.kept_bytes(geometry.embedding_parameters))
    shrunk = int((given - kept) * wanted.bits / current.bits)
    return min(given, wanted.kept_bytes(geometry.embedding_parameters) + shrunk)


def _fixed_pool(base: Plan) -> str | None:
    if base.deployment.kv_cache_bytes is not None:
        return "the pool has a fixed size (--kv-cache-memory): what is saved elsewhere does not reach it"
    return None


def _shorter(base: Plan) -> Trial | str:
    length = base.max_model_len // 2
    longest = base.pool.longest_sequence_tokens if base.pool else 0
    if base.fits is False and 0 < longest < length:
        length = longest
    if length < 1 or (base.memory is not None and base.memory.deficit_bytes):
        return "weights and the rest alone do not fit: no length is short enough"
    return (
        f"longest sequence {base.max_model_len:,} → {length:,} tokens",
        base.geometry,
        replace(base.deployment, max_model_len=length),
    )


def _fewer_sequences(base: Plan) -> Trial | str:
    wanted, held = base.deployment.max_num_seqs, base.max_concurrent_sequences or 0
    if wanted is None or wanted <= held:
        return "as many sequences as were asked for fit"
    if held == 0:
        return "not one sequence of the longest length fits"
    return f"sequences at once {wanted:,} → {held:,}", base.geometry, replace(base.deployment, max_num_seqs=held)


def _smaller_step(base: Plan) -> Trial | str:
    deployment = base.deployment
    if fixed := _fixed_pool(base):
        return fixed
    if deployment.activation_bytes is not None:
        return "activations were given as a number, which does not say how they depend on the step"
    if deployment.max_batched_tokens <= SMALLER_STEP:
        return f"a step has {deployment.max_batched_tokens:,} tokens already"
    trial = replace(deployment, max_batched_tokens=SMALLER_STEP)
    return f"step of {deployment.max_batched_tokens:,} → {SMALLER_STEP:,} tokens", base.geometry, trial


def _more_utilization(base: Plan) -> Trial | str:
    if fixed := _fixed_pool(base):
        return fixed
    if base.deployment.utilization >= MORE_UTILIZATION:
        return f"the share is {base.deployment.utilization:g} already; more leaves nothing for surprises"
    if base.deployment.co_tenant_bytes:
        return "other processes use the GPU: a larger share may not be there"
    trial = replace(base.deployment, utilization=MORE_UTILIZATION)
    return f"utilization {base.deployment.utilization:g} → {MORE_UTILIZATION:g}", base.geometry, trial


def _no_headroom(base: Plan) -> Trial | str:
    if base.deployment.headroom == 0.0:
        return "no headroom is held back"
    return f"headroom {base.deployment.headroom:.0%} → 0", base.geometry, replace(base.deployment, headroom=0.0)


def _smaller_blocks(base: Plan) -> Trial | str:
    if base.layout.block_tokens > base.deployment.block_tokens:
        return f"the engine sets blocks of {base.layout.block_tokens} tokens itself, as large as a state"
    if base.deployment.block_tokens <= DEFAULT_BLOCK_TOKENS:
        return f"blocks have {base.deployment.block_tokens} tokens: at most that less one is wasted in each sequence"
    trial = replace(base.deployment, block_tokens=DEFAULT_BLOCK_TOKENS)
    return f"block size {base.deployment.block_tokens} → {DEFAULT_BLOCK_TOKENS} tokens", base.geometry, trial


def _hybrid_manager(base: Plan) -> Trial | str:
    if base.kv_bytes_per_token == base.kv_bytes_per_token_ideal:
        return "every layer keeps every token: there is nothing to give back"
    if base.deployment.hybrid_manager:
        return "it is on already"
    return "hybrid cache manager on", base.geometry, replace(base.deployment, hybrid_manager=True)


def _more(what: str) -> Callable[[Plan], Trial | str]:
    def make(base: Plan) -> Trial | str:
        if what != "dp" and (fixed := _fixed_pool(base)):
            return fixed
        latent = all(cache.replicated for cache in base.geometry.attention_caches) and base.geometry.attention_caches
        now = {"tp": base.deployment.tp, "pp": base.deployment.pp, "dp": base.deployment.dp}[what]
        if what == "tp" and latent and base.weighing.total and base.fits:
            note = " (weights alone are divided: the latent cache is kept whole on each)"
        else:
            note = ""
        twice = 2 * now
        trial = (
            replace(base.deployment, tp=twice)
            if what == "tp"
            else replace(base.deployment, pp=twice)
            if what == "pp"
            else replace(base.deployment, dp=twice)
        )
        return f"{what} {now} → {twice}{note}", base.geometry, trial

    return make


def _offload_weights(base: Plan) -> Trial | str:
    if fixed := _fixed_pool(base):
        return fixed
    kept = int(base.weighing.total * (1 - OFFLOADED_SHARE))
    gone = (base.weighing.total - kept) / base.deployment.tp / base.deployment.pp / (1 << 30)
    trial = replace(base.deployment, model_weight_bytes=kept)
    return f"{gone:.1f} GiB of weights on each GPU to host memory", base.geometry, trial


def _offload_cache(base: Plan) -> Trial | str:
    if not base.kv_bytes_per_token:
        return "the model keeps states and no keys and values"
    tokens = HOST_BYTES // base.kv_bytes_per_token
    return (
        f"it adds nothing for running sequences; {HOST_BYTES >> 30} GiB of host memory keep {HOST_BYTES:,} / "
        f"{base.kv_bytes_per_token:,} = {tokens:,} tokens of prefixes that would be computed again"
    )


def _allocation_policy(base: Plan) -> Trial | str:
    return (
        "it adds no memory: any free block serves any sequence. It pays where something wants neighbouring blocks, "
        "such as KV transfer, offload, or an elastic pool"
    )


def _swap(geometry: ModelGeometry, exchange: Callable[[AttentionCache], AttentionCache]) -> ModelGeometry:
    def of(cache: Cache) -> Cache:
        if isinstance(cache, AttentionCache) and cache.kind in (CacheKind.FULL, CacheKind.SLIDING, CacheKind.CHUNKED):
            return exchange(cache)
        return cache

    return replace(geometry, layers=tuple(tuple(of(cache) for cache in layer) for layer in geometry.layers))


def _grouped_model(base: Plan) -> Trial | str:
    heads = base.geometry.attention_heads
    plain = [cache for cache in base.geometry.attention_caches if not cache.replicated]
    if not plain:
        return "the model's cache is latent, or none: smaller than grouped heads already"
    target = max(1, heads // 8)
    if min(cache.kv_heads for cache in plain) <= target:
        return f"the model has {heads // min(cache.kv_heads for cache in plain)} query heads to a KV head already"
    geometry = _swap(base.geometry, lambda cache: replace(cache, kv_heads=min(cache.kv_heads, target)))
    return f"KV heads {max(cache.kv_heads for cache in plain)} → {target}, weights counted as they are", geometry, (
        base.deployment
    )  # fmt: skip


def _latent_model(base: Plan) -> Trial | str:
    plain = [cache for cache in base.geometry.attention_caches if not cache.replicated]
    if not plain:
        return "the model's cache is latent, or none, already"
    geometry = _swap(
        base.geometry,
        lambda _: AttentionCache(kind=CacheKind.MLA, kv_heads=1, key_dim=MLA_ELEMENTS, value_dim=0),
    )
    if plan(geometry, base.deployment).kv_bytes_per_token >= base.kv_bytes_per_token:
        return f"a latent vector is whole on each of {base.deployment.tp} ranks: no smaller than this model's share"
    return f"a latent vector of {MLA_ELEMENTS} in each layer, weights counted as they are", geometry, base.deployment
