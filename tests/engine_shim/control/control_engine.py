"""A process that offers control as an engine does: a loop with steps, asleep while there is nothing to do.

`control_engine.py MAP [--deaf] [--fork]` prints one line of JSON when it serves. A `compact` takes as many steps as its
`max_moves` says, or until moving is switched off; a deaf engine takes nothing. With `--fork` it starts a child that
outlives it, and tells its pid.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from engine_shim.control.mailbox import ControlMailbox, ControlTicket
from engine_shim.control.messages import (
    CompactRequest,
    ControlReply,
    MovingRequest,
    RelocationRequest,
    RunReply,
    StatusReply,
    SwitchReply,
)
from engine_shim.control.server import ControlServer


class Engine:
    """Steps that do nothing but count."""

    def __init__(self) -> None:
        self.awake = threading.Event()
        self.mailbox = ControlMailbox(self.awake.set)
        self.moving = True
        self.relocation = False
        self.run: ControlTicket | None = None
        self.steps_left = 0
        self.moved = 0
        self.last: RunReply | None = None

    def serve(self) -> None:
        while True:
            if self.run is None:
                self.awake.wait()
                self.awake.clear()
            while self.mailbox.pending():
                ticket = self.mailbox.take()
                if ticket is not None:
                    self.begin(ticket)
            self.step()

    def begin(self, ticket: ControlTicket) -> None:
        request = ticket.request
        reply: ControlReply
        if isinstance(request, CompactRequest):
            self.run, self.steps_left, self.moved = ticket, request.max_moves or 0, 0
            return
        if isinstance(request, MovingRequest):
            self.moving = request.on
            reply = SwitchReply(on=self.moving)
        elif isinstance(request, RelocationRequest):
            self.relocation = request.on
            reply = SwitchReply(on=self.relocation)
        elif request.op == "plan":
            reply = self.report("planned", 3)
        else:
            reply = StatusReply(
                moving=self.moving,
                relocation=self.relocation,
                running=self.run is not None,
                policy="vllm",
                reason="" if self.moving else "moving is switched off",
                last_report=self.last,
            )
        self.mailbox.answer(ticket, reply)

    def step(self) -> None:
        if self.run is None:
            return
        if self.moving and self.steps_left > 0:
            self.steps_left -= 1
            self.moved += 1
            time.sleep(0.002)
            return
        decision = "compacted" if self.moving else "aborted"
        self.last = self.report(decision, self.moved + self.steps_left)
        self.mailbox.answer(self.run, self.last)
        self.run = None

    def report(self, decision: str, planned: int) -> RunReply:
        return RunReply(
            decision=decision,
            reason="",
            planned_moves=planned,
            moved_blocks=self.moved,
            moved_bytes=4096 * self.moved,
            fragmentation_rate_before=0.5,
            fragmentation_rate_after=0.1,
            largest_allocatable_run_before=10,
            largest_allocatable_run_after=18,
            details={"chunks": self.moved, "dropped": {"pinned": 0}},
        )


def main() -> None:
    engine = Engine()
    server = ControlServer.start(Path(sys.argv[1]), engine.mailbox)
    child = 0
    if "--fork" in sys.argv:
        child = os.fork()
        if child == 0:
            os.close(1)
            time.sleep(600)
            os._exit(0)
    print(json.dumps({"path": str(server.path), "child": child}), flush=True)
    if "--deaf" in sys.argv:
        threading.Event().wait()
    engine.serve()


if __name__ == "__main__":
    main()
