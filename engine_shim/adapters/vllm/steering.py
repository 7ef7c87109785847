"""All of ours that changes what one vLLM engine core does, where its operator asked for it, and the control socket.

With nothing asked for, the socket answers questions, refuses the rest, and can take the plugin out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from engine_shim.adapters.opening import whole_number
from engine_shim.adapters.vllm.allocation import Allocation, allocation_setting, relocation_refusal
from engine_shim.adapters.vllm.compaction import NOT_ASKED, Readiness, compaction_asked, compaction_refusal
from engine_shim.adapters.vllm.control_desk import ControlDesk
from engine_shim.adapters.vllm.mover import VllmMover
from engine_shim.adapters.vllm.relocator import BYTES_A_STEP, Relocator
from engine_shim.adapters.vllm.watched_pool import WatchedPool
from engine_shim.compaction.compactor import Compactor
from engine_shim.control.mailbox import ControlMailbox
from engine_shim.control.server import ControlServer

log = logging.getLogger("kvatlas.shim")

_IDLE_PAUSE_SECONDS = 0.01
_LEAVING_SECONDS = 0.2


class Steering:
    """For the engine core's thread, except `wake`, which any thread may call."""

    def __init__(
        self,
        scheduler: Any,
        environment: Mapping[str, str],
        *,
        turn_off: Callable[[str], None],
        stop_if_asked: Callable[[], None],
    ) -> None:
        """`turn_off` asks for the end of everything, which `stop_if_asked` then brings, where no step would come."""
        self.core: Any = None  # vLLM's EngineCore, once it has been seen
        self.relocator: Relocator | None = None
        self.mover: VllmMover | None = None
        self.compactor: Compactor | None = None
        self._scheduler = scheduler
        self._environment = environment
        self._turn_off, self._stop_if_asked = turn_off, stop_if_asked
        self._watched: WatchedPool | None = None
        self._mailbox = ControlMailbox(self.wake)
        self._server: ControlServer | None = None
        self._desk: ControlDesk | None = None
        self._no_relocation = self.no_compaction = ""
        self._readiness = Readiness(scheduler, lambda: self.core)

    def prepare(self, watched: WatchedPool) -> None:
        """Before observation's hooks are put on; again after a sleep, when the pool has a new map."""
        self._watched = watched
        if self._desk is None:
            self._prepare_relocation(watched)
            self._prepare_compaction(watched)
            self._desk = ControlDesk(
                self._mailbox,
                relocator=self.relocator,
                no_relocation=self._no_relocation,
                compactor=self.compactor,
                no_compaction=self.no_compaction,
                relocate=self.relocate,
                turn_off=self._leave,
            )
        self._readiness.asleep = False
        if self.mover is not None:
            self.mover.watched = watched
        watched.on_moved = self._live_moved
        self._show_relocation()
        if watched.observer.path is not None:
            self._server = ControlServer.offer(watched.observer.path, self._mailbox)

    def boundary(self) -> None:
        """Between two steps: carry out what was asked for, and a slice of what is under way."""
        if self._desk is not None and self._mailbox.pending():
            self._desk.serve()
        if self.compactor is not None and self.compactor.wants_boundary and self._watched is not None:
            self._watched.publish()
            self.compactor.step()
            self._watched.publish()

    def sleeps(self) -> None:
        """The pool's memory was given back: there is nothing to move until `prepare`."""
        self._readiness.asleep = True

    def close(self) -> None:
        """The map goes, and the control socket with it."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def stop(self, reason: str) -> None:
        """Change nothing any more, and hold the engine core no longer. Idempotent."""
        if self.relocator is not None:
            self.relocator.stop(reason)
        if self.compactor is not None:
            self.compactor.set_moving(False, reason)
            self.compactor.step()  # so that whoever waits for a run hears that it is over
        self.close()
        self.core = None

    def relocate(self, on: bool) -> None:
        """Switch relocating allocation on or off from the next step on, where there is a relocator."""
        if self.relocator is not None:
            self.relocator.switch(on)
            self._show_relocation()

    # An engine core without requests takes no steps.

    def wake(self) -> None:
        """Have an idle engine core look at what was asked for. In-process engines have no thread to wake."""
        core = self.core
        callbacks, queue = getattr(core, "_idle_state_callbacks", None), getattr(core, "input_queue", None)
        if callbacks is None or queue is None:
            return
        from vllm.v1.engine import EngineCoreRequestType

        if self._idle not in callbacks:  # a core that never idles calls none: one that waits serves all who ask
            callbacks.append(self._idle)
        queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def _idle(self, core: Any) -> None:
        """vLLM calls this where it would wait; what raises here would end the engine core."""
        try:
            self._stop_if_asked()
            while True:
                self.boundary()
                working = self.compactor is not None and self.compactor.wants_step
                if not working or not core.input_queue.empty():
                    break
            if working:
                _later(self.wake)
        except Exception as error:  # noqa: BLE001 - see above
            log.error("what was asked for of an idle engine failed: %r", error)

    def _leave(self, reason: str) -> None:
        self._turn_off(reason)
        _later(self.wake, _LEAVING_SECONDS)  # the reply goes first

    # Moves of live blocks

    def _prepare_compaction(self, watched: WatchedPool) -> None:
        if not compaction_asked(self._environment):
            self.no_compaction = NOT_ASKED
            return
        if refusal := _refusal(compaction_refusal, self._scheduler):
            log.warning("moves of live blocks are refused: %s", refusal)
            self.no_compaction = refusal
            return
        self.mover = VllmMover(
            self._scheduler, watched.spec.block_bytes, core=lambda: self.core, refusal=self._readiness.refusal
        )
        self.compactor = Compactor(self.mover, watched.spec.total_blocks, wake=self.wake)

    def _live_moved(self, blocks: Collection[int]) -> None:
        if self.relocator is not None:
            self.relocator.look_again(blocks)

    # Relocation

    def _prepare_relocation(self, watched: WatchedPool) -> None:
        setting = allocation_setting(self._environment)
        self._no_relocation = "vLLM was started with its own allocation; KVATLAS_VLLM_ALLOCATION=auto allows another"
        if setting is Allocation.STOCK:
            return
        if refusal := _refusal(relocation_refusal, self._scheduler):
            log.warning("relocating allocation is refused, vLLM allocates by itself: %s", refusal)
            self._no_relocation = refusal
            return
        mebibytes = whole_number(self._environment, "KVATLAS_VLLM_RELOCATION_MIB", BYTES_A_STEP >> 20)
        self.relocator = Relocator(
            self._scheduler,
            watched.spec.block_bytes,
            bytes_a_step=mebibytes << 20,
            on_evicted=self._evicted,
            on_moved=self._moved,
            on_failed=self._show_relocation,
        )
        self.relocator.install()
        self.relocator.switch(setting is Allocation.RELOCATING)

    def _show_relocation(self) -> None:
        on = self.relocator is not None and self.relocator.on
        if self._watched is not None:
            self._watched.observer.set_policy("relocating" if on else "vllm")
            self._watched.observer.set_flag(relocating=on)

    def _evicted(self, blocks: Sequence[int]) -> None:
        if self._watched is not None:
            self._watched.tap.lost(blocks)

    def _moved(self, sources: Sequence[int], destinations: Sequence[int], more: int) -> None:
        if self._watched is None:
            return
        observer = self._watched.observer
        observer.moved(sources, destinations, live=False)
        if more:
            observer.counted("relocation_copies", more)
            observer.counted("relocation_bytes", more * self._watched.spec.block_bytes)


def _refusal(examine: Callable[[Any], str], scheduler: Any) -> str:
    """What stands against it. Where that cannot be found out either, it stands against it: observation goes on."""
    try:
        return examine(scheduler)
    except Exception as error:  # noqa: BLE001 - whatever has changed in vLLM
        return f"this vLLM is not as expected: {error!r}"


def _later(call: Callable[[], None], seconds: float = _IDLE_PAUSE_SECONDS) -> None:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
