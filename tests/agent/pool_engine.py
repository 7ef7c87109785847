"""A real engine process without a model: a BlockPool with its map and control socket, whose blocks hold numbers.

`pool_engine.py JSON` takes one object: folder, engine_id, policy, blocks, live (share), churn (sequences that end and
others that begin, a second), kind, relocation (may it be switched?), consumer, moving, control, chunk (moves a step at
most), hold (a file: while it is there, no run goes on). It prints one line of JSON when it serves, and checks after
each run that every table still leads to its own contents; where one does not, it ends with status 3.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_shim import BlockPool, MapObserver, MapSpec
from engine_shim.compaction.mover import BlockFacts, Moves, MoveSwitch
from engine_shim.compaction.planning import MovePlan, plan_moves
from engine_shim.compaction.report import CompactionReport
from engine_shim.compaction.run import CompactionRun, RunSettings
from engine_shim.control.mailbox import ControlMailbox, ControlTicket
from engine_shim.control.messages import (
    CompactRequest,
    ControlReply,
    ErrorReply,
    MovingRequest,
    PlanRequest,
    RelocationRequest,
    RunReply,
    StatusReply,
    SwitchReply,
    TurnOffRequest,
)
from engine_shim.control.server import ControlServer
from engine_shim.pool.pool_moves import PoolMoves

BLOCK_BYTES = 1 << 20
TOKENS = 16
SEQUENCE_BLOCKS = 8
STEP_SECONDS = 0.01


class Mover:
    """Moves blocks of the pool, the numbers in them, and what the tables say."""

    block_bytes = BLOCK_BYTES
    keeps_cached = True

    def __init__(self, pool: BlockPool, tables: dict[int, list[int]]) -> None:
        self.pool, self.tables = pool, tables
        self.contents = [-1] * pool.num_blocks
        self.moves = PoolMoves(pool)

    def refusal(self) -> str:
        return ""

    def columns(self) -> BlockFacts:
        return self._facts(np.arange(self.pool.num_blocks), self.pool.states())

    def facts(self, blocks: NDArray[np.int64]) -> BlockFacts:
        return self._facts(blocks, np.array([self.pool.state(block) for block in blocks.tolist()], np.uint8))

    def _facts(self, blocks: NDArray[np.int64], states: NDArray[np.uint8]) -> BlockFacts:
        nobody = np.zeros(blocks.size, np.uint32)
        return BlockFacts(states, nobody, nobody, self.moves.references_of(blocks.tolist()))

    def found(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        counts = np.bincount([b for table in self.tables.values() for b in table], minlength=self.pool.num_blocks)
        return counts[blocks]

    def revalidate(self, moves: Moves) -> Moves:
        return moves

    def reserve(self, moves: Moves) -> int:
        self.moves.reserve([(source, destination) for source, destination in moves.tolist()])
        return 0

    def copy(self, moves: Moves) -> None:
        for source, destination in moves.tolist():  # whatever is cached in the way changes places
            self.contents[source], self.contents[destination] = self.contents[destination], self.contents[source]

    def digests(self, blocks: NDArray[np.int64]) -> Sequence[bytes]:
        return [str(self.contents[block]).encode() for block in blocks.tolist()]

    def commit(self, moves: Moves) -> None:
        self.moves.commit()
        place = dict(moves.tolist())
        for table in self.tables.values():
            table[:] = [place.get(block, block) for block in table]

    def abandon(self, moves: Moves) -> None:
        self.moves.abandon()

    def give_up(self, moves: Moves) -> None:
        blocks = set(moves.ravel().tolist())
        self.moves.scrap(blocks)
        for sequence in [number for number, table in self.tables.items() if not blocks.isdisjoint(table)]:
            self.pool.release([block for block in self.tables.pop(sequence) if block not in blocks])


class Engine:
    """Steps: what is asked for, a slice of a run, some traffic, and a publish."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.random = options, random.Random(options.get("seed", 1))
        blocks, policy = options["blocks"], options.get("policy", "lowest-any")
        spec = MapSpec(
            engine_id=options.get("engine_id", "engine"),
            kind=options.get("kind", "reference"),
            model="org/model",
            pool="kv",
            total_blocks=blocks,
            block_tokens=TOKENS,
            block_bytes=BLOCK_BYTES,
            dtype="float16",
            policy=policy,
        )
        self.observer = MapObserver.create(spec, Path(options["folder"]))
        self.pool = BlockPool(blocks, policy=policy, headroom=0.0, observer=self.observer, block_bytes=BLOCK_BYTES)
        self.tables: dict[int, list[int]] = {}
        self.mover, self.switch = Mover(self.pool, self.tables), MoveSwitch()
        if not options.get("moving", True):
            self.switch.off("this engine does not allow moving", at_start=True)
        self.awake = threading.Event()
        self.mailbox = ControlMailbox(self.awake.set)
        self.run: CompactionRun | None = None
        self.ticket: ControlTicket | None = None
        self.last: RunReply | None = None
        self.next_sequence = 0
        self._fill()

    def _fill(self) -> None:
        while self.pool.can_allocate(SEQUENCE_BLOCKS, new_sequence=True):
            self._begin()
        while self.pool.num_used > self.options.get("live", 0.65) * self.pool.num_blocks:
            self._end()
        self.publish()

    def _begin(self) -> None:
        self.next_sequence += 1
        allocation = self.pool.allocate(SEQUENCE_BLOCKS)
        for source, destination in allocation.copies:
            self.mover.contents[destination] = self.mover.contents[source]
        table = self.tables[self.next_sequence] = allocation.blocks
        for position, block in enumerate(table):
            self.mover.contents[block] = self.next_sequence * 1000 + position
        if self.options.get("prefixes", True):
            self.pool.register_blocks(table, [self.next_sequence * 1000 + position for position in range(len(table))])
        self.observer.wrote(table, [TOKENS] * len(table), TOKENS * len(table))

    def _end(self) -> None:
        self.pool.release(self.tables.pop(self.random.choice(list(self.tables)))[::-1])

    def publish(self) -> None:
        self.observer.step_ended(len(self.tables) if self.options.get("churn", 0) else 0, 0)

    def serve(self) -> None:
        churn, owed, last = self.options.get("churn", 0), 0.0, time.monotonic()
        while True:
            if self.run is None and not churn:
                self.awake.wait(0.25)
            else:
                time.sleep(STEP_SECONDS)
            self.awake.clear()
            while (ticket := self.mailbox.take()) is not None:
                reply = self.carry_out(ticket)
                if reply is not None:
                    self.mailbox.answer(ticket, reply)
            self.step_run()
            now = time.monotonic()
            owed, last = owed + churn * (now - last), now
            while owed >= 1:
                owed -= 1
                self._end()
                self._begin()
            self.publish()

    def step_run(self) -> None:
        hold = self.options.get("hold")
        if self.run is None or (hold and Path(hold).exists()) or self.run.step():
            return
        report, ticket = self.run.report(), self.ticket
        self.run = self.ticket = None
        for sequence, table in self.tables.items():
            for position, block in enumerate(table):
                if self.mover.contents[block] != sequence * 1000 + position:
                    print(f"block {block} does not hold what it must", file=sys.stderr, flush=True)
                    sys.exit(3)
        if report is not None and ticket is not None:
            self.last = report_reply(report)
            self.mailbox.answer(ticket, self.last)

    def carry_out(self, ticket: ControlTicket) -> ControlReply | None:
        request = ticket.request
        if isinstance(request, CompactRequest):
            if self.run is not None:
                return ErrorReply(error="busy", message="a run is in progress", action="wait")
            settings = RunSettings(
                target=request.target,
                max_moves=request.max_moves,
                max_seconds=request.max_seconds,
                max_chunk_moves=self.options.get("chunk", 64),
            )
            self.run, self.ticket = CompactionRun(self.mover, self.switch, settings), ticket
            return None
        if isinstance(request, PlanRequest):
            return plan_reply(plan_moves(self.pool.states(), target=request.target, max_moves=request.max_moves))
        if isinstance(request, MovingRequest):
            if request.on:
                self.switch.on()
            else:
                self.switch.off("moving is switched off")
            return SwitchReply(on=not self.switch.reason, reason=self.switch.reason)
        if isinstance(request, TurnOffRequest):
            self.observer.turn_off(request.reason)
            return SwitchReply(on=False, reason=request.reason)
        may_relocate = bool(self.options.get("relocation", False))
        if isinstance(request, RelocationRequest):
            if not may_relocate:
                return ErrorReply(error="refused", message="no relocation here", action="leave it")
            self.pool.set_policy("relocating" if request.on else "vllm")
            self.observer.set_flag(relocating=request.on)
            self.observer.set_policy(self.pool.policy)
            return SwitchReply(on=request.on)
        return StatusReply(
            moving=not self.switch.reason,
            relocation=self.pool.policy == "relocating" if may_relocate else None,
            running=self.run is not None,
            policy=self.pool.policy,
            reason=self.switch.reason,
            last_report=self.last,
            details={
                "moving_off_by": self.switch.off_by or "",
                "consumer": self.options.get("consumer"),
                "keeps_cached": self.mover.keeps_cached,
            },
        )


def report_reply(report: CompactionReport) -> RunReply:
    details = {name: value for name, value in report.to_json().items() if name not in ("outcome", "reason")}
    return RunReply(
        decision=report.outcome.value,
        reason=report.reason,
        planned_moves=report.planned_moves,
        moved_blocks=report.moved_blocks,
        moved_bytes=report.moved_bytes,
        fragmentation_rate_before=report.before.fragmentation,
        fragmentation_rate_after=report.after.fragmentation,
        largest_allocatable_run_before=report.before.largest_run,
        largest_allocatable_run_after=report.after.largest_run,
        details=details,
    )


def plan_reply(plan: MovePlan) -> RunReply:
    return RunReply(
        decision="planned",
        reason=plan.reason,
        planned_moves=len(plan.moves),
        moved_blocks=0,
        moved_bytes=0,
        fragmentation_rate_before=plan.fragmentation_before,
        fragmentation_rate_after=plan.fragmentation_after,
        largest_allocatable_run_before=plan.largest_run_before,
        largest_allocatable_run_after=plan.largest_run_after,
        details={"cached_lost": plan.cached_lost},
    )


def main() -> None:
    options = json.loads(sys.argv[1])
    engine = Engine(options)
    path = engine.observer.path
    assert path is not None
    server = ControlServer.start(path, engine.mailbox) if options.get("control", True) else None
    states = engine.pool.states()
    print(json.dumps({"path": str(path), "live": engine.pool.num_used / states.size}), flush=True)
    engine.serve()
    del server


if __name__ == "__main__":
    main()
