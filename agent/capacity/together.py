"""Several options at once, where no single one makes a deployment fit: the least of them that do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent.capacity.advisor import makers
from agent.capacity.deployment import Deployment
from agent.capacity.geometry import ModelGeometry
from agent.capacity.planner import Plan, PoolPlan, plan
from engine_shim.errors import SettingsError

# What is tried together, in this order, where no single option is enough: settings first, then formats, then GPUs.
TOGETHER = ("headroom", "hybrid-manager", "utilization", "fewer-in-flight", "kv-fp8", "weights-fp8", "weights-int4",
            "tensor-parallel", "tensor-parallel", "tensor-parallel")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Together:
    """Options that make the deployment fit together, none of them idle; `outcome` is the pool that comes of them."""

    keys: tuple[str, ...]
    changes: tuple[str, ...]
    outcome: PoolPlan
    gpus: int
    verdict: str

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "options": list(self.keys),
            "changes": list(self.changes),
            "num_blocks": self.outcome.num_blocks,
            "pool_tokens": self.outcome.pool_tokens,
            "gpus": self.gpus,
            "verdict": self.verdict,
        }


def together(geometry: ModelGeometry, deployment: Deployment) -> Together | None:
    """The least of several options that make the deployment fit where it does not; None where it fits,
    where one alone is enough, or where nothing is.

    Options are added in a fixed order until it fits; then each that is not needed is left out again. SettingsError as
    for `advise`.
    """
    if plan(geometry, deployment).fits is not False:
        return None
    taken: list[str] = []
    for key in TOGETHER:
        found = _chain(geometry, deployment, [*taken, key])
        if found is None:
            continue
        taken.append(key)
        if found[0].fits:
            break
    else:
        return None
    for key in list(taken):
        fewer = [one for one in taken if one != key]
        found = _chain(geometry, deployment, fewer) if key != "tensor-parallel" else None
        if found is not None and found[0].fits:
            taken = fewer
    if len(taken) < 2:
        return None  # the one that is left is in the advice already
    last = _chain(geometry, deployment, taken)
    if last is None or last[0].pool is None:
        return None
    return Together(tuple(taken), tuple(last[1]), last[0].pool, last[0].deployment.gpus, last[0].verdict)


def _chain(geometry: ModelGeometry, deployment: Deployment, keys: Sequence[str]) -> tuple[Plan, list[str]] | None:
    """The plan after these options one after the other, and what each changes; None where one does not apply."""
    known = dict(makers())
    changes: list[str] = []
    try:
        found = plan(geometry, deployment)
        for key in keys:
            made = known[key](found)
            if isinstance(made, str):
                return None
            changes.append(made[0])
            found = plan(made[1], made[2])
    except SettingsError:
        return None
    return found, changes
