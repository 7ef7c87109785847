"""What every adapter must do, in terms of no engine: the map is the pool, and a fault of ours is nobody else's.

An engine takes part as a `Subject`: a fixed piece of work that it serves step by step, and what its own objects say of
each pool. Everything here needs only the shim, so that it runs in whatever environment an engine needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from engine_shim import MapReader
from engine_shim.adapters.sglang.state_map import StateMap
from engine_shim.allocation_map.map_observer import MapObserver
from engine_shim.allocation_map.publisher import StepPublisher
from engine_shim.allocation_map.writer import MapWriter
from engine_shim.compaction.compactor import Compactor
from engine_shim.compaction.run import RunSettings
from engine_shim.errors import MapSpaceError
from engine_shim.layout import NO_GROUP, BlockState

MOST_STEPS = 5_000
STEPS_BETWEEN_RUNS = 4


@dataclass(frozen=True, slots=True)
class BlockFact:
    """One block of the map that is not FREE, by the engine's own objects."""

    state: BlockState
    references: int = 0
    holders: Mapping[str, int] = field(default_factory=dict)  # by request: the block's logical index in its sequence


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """One pool at one instant, by the engine's own objects. Blocks that are not named are FREE."""

    total: int
    blocks: Mapping[int, BlockFact]
    running: int
    waiting: int


Pools = list[tuple[MapReader, PoolFacts]]
Look = Callable[[], None]


class Subject(Protocol):
    """One engine with a fixed piece of work. `start` makes it anew; answers depend on what is in the KV memory.

    `faults` names those of FAULTS that can befall it: "call" where its observer is called from hooks of ours, which
    must hold back what it raises (where the engine is our own, the observer itself does).
    """

    faults: tuple[str, ...]

    def start(self, *, watched: bool, moves: bool = False) -> None:
        """Make the engine and give it its work."""
        ...

    def step(self, look: Look) -> bool:
        """One step; `look` is called in it where the maps show what the engine's objects hold. False: all is served."""
        ...

    def pools(self) -> Pools:
        """Every pool's map, and what it must say now."""
        ...

    def answers(self) -> Any:
        """What was generated, to be compared."""
        ...

    def hooks(self) -> int:
        """How many hooks of ours stand on this engine's objects now."""
        ...

    def compactor(self) -> Compactor | None:
        """What moves live blocks; None where this engine's cannot be moved."""
        ...

    def stop(self) -> None:
        """End it."""
        ...


class Findings:
    """What was found, rule by rule: how much was looked at, and what broke the rule."""

    def __init__(self) -> None:
        self.looked: dict[str, int] = {}
        self.broken: dict[str, list[str]] = {}

    def look(self, rule: str, what: str, seen: Any, wanted: Any) -> None:
        self.looked[rule] = self.looked.get(rule, 0) + 1
        broken = self.broken.setdefault(rule, [])
        if seen != wanted and len(broken) < 10:
            broken.append(f"{what}: {seen!r}, not {wanted!r}")

    def report(self) -> dict[str, Any]:
        """By rule, for JSON."""
        return {rule: {"looked": count, "broken": self.broken[rule]} for rule, count in self.looked.items()}


def compare(reader: MapReader, facts: PoolFacts, findings: Findings) -> None:
    """Partition, references, owners and requests of one pool, now."""
    snapshot = reader.read()
    states, count = snapshot.states, findings.look
    known = [int(state) for state in BlockState]
    count("partition", "blocks in the map", len(states), facts.total)
    count("partition", "blocks in an unknown state", int(np.count_nonzero(~np.isin(states, known))), 0)
    counted = np.bincount(states, minlength=len(snapshot.state_counts)).tolist()
    count("partition", "the counts beside the states", list(snapshot.state_counts), counted)
    count("partition", "the sum of the counts", sum(snapshot.state_counts), facts.total)
    names = {entry.owner: entry.request_id for entry in snapshot.owners}
    held: dict[str, int] = {}
    for block in range(facts.total):
        fact = facts.blocks.get(block, BlockFact(BlockState.FREE))
        count("partition", f"state of block {block}", int(states[block]), int(fact.state))
        if snapshot.references is not None:
            count("references", f"references of block {block}", int(snapshot.references[block]), fact.references)
        for name in fact.holders:
            held[name] = held.get(name, 0) + 1
        if snapshot.owner is not None:
            owner = names.get(int(snapshot.owner[block]), "")
            if not fact.holders:
                count("owners", f"owner of block {block}, which nobody holds", int(snapshot.owner[block]), 0)
            else:
                count("owners", f"{owner!r} is a holder of block {block}", owner in fact.holders, True)
                if snapshot.position is not None:
                    count(
                        "owners", f"position of block {block}", int(snapshot.position[block]), fact.holders.get(owner)
                    )
        if snapshot.group is not None and fact.state in (BlockState.FREE, BlockState.RESERVED):
            count("partition", f"group of block {block}, which holds nothing", int(snapshot.group[block]), NO_GROUP)
        if snapshot.tokens is not None and fact.state is BlockState.FREE:
            count("partition", f"tokens of block {block}, which is free", int(snapshot.tokens[block]), 0)
    if snapshot.owner is not None:
        listed = {entry.request_id: entry.blocks for entry in snapshot.owners if entry.blocks}
        count("requests", "blocks by request", listed, held)
    count("requests", "running", snapshot.running_requests, facts.running)
    count("requests", "waiting", snapshot.waiting_requests, facts.waiting)


def follow(subject: Subject, findings: Findings, *, moves: bool = False) -> tuple[Any, int]:
    """Serve the work watched, and compare at every step; the answers, and how many blocks were moved."""
    subject.start(watched=True, moves=moves)
    moved = steps = 0
    compactor = subject.compactor() if moves else None

    def done(report: Any) -> None:
        findings.look("moves", report.reason, report.outcome.value == "failed", False)

    if compactor is not None:
        commit = compactor.mover.commit

        def counting(chosen: Any) -> None:
            nonlocal moved
            commit(chosen)
            moved += len(chosen)

        compactor.mover.commit = counting  # type: ignore[method-assign, assignment]

    def look() -> None:
        for reader, facts in subject.pools():
            compare(reader, facts, findings)

    while subject.step(look):
        steps += 1
        if steps > MOST_STEPS:
            raise TimeoutError("the work does not end")
        if compactor is not None and steps % STEPS_BETWEEN_RUNS == 0 and not compactor.active:
            compactor.start(RunSettings(target=0.0, verify=True, max_step_seconds=5.0), done=done)
    for reader, facts in subject.pools():
        compare(reader, facts, findings)
        findings.look("partition", "blocks in use at rest", int(reader.read().state_counts[BlockState.USED]), 0)
    answers = subject.answers()
    subject.stop()
    return answers, moved


def notice(subject: Subject) -> dict[str, bool]:
    """The control: facts that are wrong in one thing must break the rule that it is of. By rule: did they?"""
    noticed: dict[str, bool] = {}
    subject.start(watched=True)

    def look() -> None:
        reader, facts = subject.pools()[0]
        held = [block for block, fact in facts.blocks.items() if fact.state is BlockState.USED]
        if noticed or not held:
            return
        block, fact = held[0], facts.blocks[held[0]]
        wrong = {
            "partition": replace(facts, blocks={**facts.blocks, block: replace(fact, state=BlockState.CACHED)}),
            "references": replace(facts, blocks={**facts.blocks, block: replace(fact, references=99)}),
            "owners": replace(facts, blocks={**facts.blocks, block: replace(fact, holders={"somebody else": 0})}),
            "requests": replace(facts, running=facts.running + 1),
        }
        for rule, given in wrong.items():
            findings = Findings()
            compare(reader, given, findings)
            noticed[rule] = bool(findings.broken.get(rule))

    for _ in range(MOST_STEPS):
        if not subject.step(look):
            break
    subject.stop()
    return noticed


def serve(subject: Subject, *, watched: bool) -> tuple[Any, int]:
    """Serve the work with nobody looking; the answers, and the hooks that are on the engine in the end."""
    subject.start(watched=watched)
    for _ in range(MOST_STEPS):
        if not subject.step(lambda: None):
            answers, hooks = subject.answers(), subject.hooks()
            subject.stop()
            return answers, hooks
    raise TimeoutError("the work does not end")


def examine(subject: Subject) -> dict[str, Any]:
    """The whole suite on one engine."""
    findings = Findings()
    expected, hooks = serve(subject, watched=False)
    findings.look("faults", "hooks on an engine that is not watched", hooks, 0)
    answers, _ = follow(subject, findings)
    findings.look("faults", "the answers are those of the engine alone", answers == expected, True)
    for name, fault in FAULTS.items():
        if name not in subject.faults:
            continue
        with fault() as happened:
            answers, hooks = serve(subject, watched=True)
        findings.look("faults", f"{name} was reached", bool(happened), True)
        findings.look("faults", f"the answers in spite of {name}", answers == expected, True)
        if name in ("call", "states"):
            findings.look("faults", f"hooks left after {name}", hooks, 0)
    moved = None
    subject.start(watched=True, moves=True)
    can_move = subject.compactor() is not None
    subject.stop()
    if can_move:
        answers, moved = follow(subject, findings, moves=True)
        findings.look("moves", "the answers are those without moves", answers == expected, True)
    return {"rules": findings.report(), "moved": moved, "noticed": notice(subject), "answers": len(expected)}


@contextmanager
def _patched(owner: type, name: str, make: Callable[[list[str], Any], Any]) -> Iterator[list[str]]:
    happened: list[str] = []
    stock = vars(owner)[name]
    setattr(owner, name, make(happened, stock))
    try:
        yield happened
    finally:
        setattr(owner, name, stock)


def _raising(error: BaseException, *, as_class_method: bool = False, after: int = 0) -> Callable[[list[str], Any], Any]:
    def make(happened: list[str], stock: Any) -> Any:
        calls = 0

        def broken(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls <= after:
                return stock(*args, **kwargs)
            happened.append(str(error))
            raise error

        return classmethod(broken) if as_class_method else broken

    return make


FAULTS: dict[str, Callable[[], Any]] = {
    "publish": lambda: _patched(StepPublisher, "publish", _raising(RuntimeError("a publish of ours fails"), after=5)),
    "no room": lambda: _patched(
        MapWriter, "create", _raising(MapSpaceError("no room for the map"), as_class_method=True)
    ),
    "states": lambda: _patched(StateMap, "publish", _raising(RuntimeError("a publish of ours fails"), after=5)),
    "call": lambda: _patched(MapObserver, "step_ended", _raising(RuntimeError("a call of ours fails"), after=3)),
}


@contextmanager
def setting(name: str, value: str) -> Iterator[None]:
    """An environment variable, for as long."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
