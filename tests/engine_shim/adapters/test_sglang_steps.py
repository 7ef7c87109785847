"""What SGLang's loops tell of their steps and of their rest, with stand-ins of its classes that go round as they do.

The real allocators and radix cache are in tests/engines/sglang.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from engine_shim.adapters import sglang as adapter
from engine_shim.adapters.sglang.attachment import REST_SECONDS, Attachment
from engine_shim.allocation_map.reader import MapReader
from engine_shim.layout import BlockState
from engine_shim.snapshot import MapSnapshot

PAGES = 40
SELDOM = {"KVATLAS_SGLANG_PUBLISH_MS": "3600000"}  # nothing is published that is not published at once
OFTEN = {"KVATLAS_SGLANG_PUBLISH_MS": "0"}


class Allocator:
    """Slots of one token each."""

    size, page_size, free_group = PAGES, 1, None

    def __init__(self) -> None:
        self.free_pages = torch.arange(0)
        self.clear()

    def alloc(self, need_size: int) -> torch.Tensor:
        taken, self.free_pages = self.free_pages[:need_size], self.free_pages[need_size:]
        return taken

    def free(self, free_index: torch.Tensor) -> None:
        self.free_pages = torch.cat((free_index, self.free_pages))

    def clear(self) -> None:
        self.free_pages = torch.arange(1, PAGES + 1)

    def get_all_free_pages(self) -> torch.Tensor:
        return self.free_pages


class Tree:
    """A radix cache that keeps nothing."""

    page_size = 1

    def __init__(self) -> None:
        self.root_node = SimpleNamespace(children={})
        self.token_to_kv_pool_allocator = Allocator()

    def inc_lock_ref(self, node: Any) -> None: ...

    def dec_lock_ref(self, node: Any) -> None: ...

    def _insert_helper(self, node: Any, key: Any, value: Any) -> None: ...


class Request:
    """Takes a slot a step, until it has `left` none to go."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.slots: list[torch.Tensor] = []

    def finished(self) -> bool:
        return self.left <= 0


class Batch:
    def __init__(self, *requests: Request) -> None:
        self.reqs = list(requests)

    def filter(self) -> Batch:
        self.reqs = [request for request in self.reqs if not request.finished()]
        return self


class Scheduler:
    """As SGLang 0.5.23's, in what its loops do to `running_batch` and when they call the methods that are wrapped."""

    def __init__(self, tree: Tree) -> None:
        self._allocator = tree.token_to_kv_pool_allocator
        self.running_batch = Batch()
        self.last_batch: Batch | None = None
        self.waiting_queue: list[Request] = []
        self.in_flight: list[Batch] = []
        self.paused = False
        self.steps = 0

    def process_batch_result(self, batch: Batch, result: Any = None) -> str:
        for request in batch.reqs:
            if not request.finished():
                request.left -= 1
                request.slots.append(self._allocator.alloc(1))
                if request.finished():
                    self._allocator.free(torch.cat(request.slots))
        self.steps += 1
        return "processed"

    def on_idle(self) -> str:
        return "idle"

    def _record_scheduler_state_for_paused_engine(self) -> str:
        return "paused"

    def _next_batch(self) -> Batch | None:
        if self.last_batch is not None and self.last_batch is not self.running_batch:
            self.running_batch.reqs += self.last_batch.filter().reqs
        self.running_batch.filter()
        if self.waiting_queue:
            prompts, self.waiting_queue = Batch(*self.waiting_queue), []
            return prompts
        return self.running_batch if self.running_batch.reqs else None

    def round_normal(self) -> None:
        """Once through `event_loop_normal`."""
        if self.paused:
            self._record_scheduler_state_for_paused_engine()
            return
        batch = self._next_batch()
        if batch is not None:
            self.process_batch_result(batch, None)
        else:
            self.on_idle()
        self.last_batch = batch

    def round_overlap(self) -> None:
        """Once through `event_loop_overlap`: the result of a batch is looked at when the next one has been started."""
        batch = self._next_batch()
        if batch is not None:
            self.in_flight.append(Batch(*batch.reqs))
        if self.last_batch is not None:
            self.process_batch_result(self.in_flight.pop(0))
        elif batch is None:
            self.on_idle()
        self.last_batch = batch


class Watched:
    """One scheduler over one tree, and what its map says."""

    def __init__(self, scheduler_class: type[Scheduler], environment: dict[str, str], **more: Any) -> None:
        self.tree = Tree()
        one = adapter.attach(self.tree, environment, **more)
        assert one is not None
        self.attachment: Attachment = one
        self.scheduler = scheduler_class(self.tree)
        self._reader = MapReader(one.pools[0].map.path)

    def read(self) -> MapSnapshot:
        return self._reader.read()

    def told(self) -> tuple[int, int, int, int]:
        """Running, waiting, steps, and slots that are used, by the map."""
        shown = self.read()
        used = int(shown.state_counts[BlockState.USED])
        return shown.running_requests, shown.waiting_requests, shown.counters["steps"], used

    def close(self) -> None:
        self._reader.close()
        self.attachment.stop("the test is over")


Watch = Callable[..., Watched]


@pytest.fixture
def scheduler_class(monkeypatch: pytest.MonkeyPatch) -> type[Scheduler]:
    """A class of this test alone, where SGLang's would be found."""
    made: type[Scheduler] = type("Scheduler", (Scheduler,), dict(vars(Scheduler)))
    module = ModuleType("sglang.srt.managers.scheduler")
    module.Scheduler = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


@pytest.fixture
def watch(
    scheduler_class: type[Scheduler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Watched]]:
    monkeypatch.setenv("KVATLAS_DIR", str(tmp_path))
    made: list[Watched] = []

    def start(environment: dict[str, str], **more: Any) -> Watched:
        made.append(Watched(scheduler_class, environment, **more))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.mark.parametrize("tells_of_rest", [True, False], ids=["with on_idle", "without on_idle"])
@pytest.mark.parametrize("loop", ["round_normal", "round_overlap"])
def test_when_the_last_request_has_finished_the_map_says_so(
    watch: Watch, scheduler_class: type[Scheduler], monkeypatch: pytest.MonkeyPatch, loop: str, tells_of_rest: bool
) -> None:
    if not tells_of_rest:
        monkeypatch.setattr(scheduler_class, "on_idle", None)  # another version's: there is nothing to wrap
    watched = watch(SELDOM)
    if not tells_of_rest:
        monkeypatch.setattr(scheduler_class, "on_idle", lambda _: None)
    scheduler = watched.scheduler
    scheduler.waiting_queue = [Request(5), Request(9), Request(9)]
    for _ in range(12):
        getattr(scheduler, loop)()
    assert watched.told() == (0, 0, scheduler.steps, 0)
    assert scheduler.steps >= 9


def test_what_runs_is_not_told_of_at_every_step(watch: Watch) -> None:
    watched = watch(SELDOM)
    watched.scheduler.waiting_queue = [Request(9), Request(1)]
    for _ in range(8):
        watched.scheduler.round_normal()
        assert watched.told() == (0, 0, 0, 0)  # one of them runs, and the next step will tell


def test_a_request_runs_from_its_first_step_to_its_last(watch: Watch) -> None:
    watched = watch(OFTEN)
    watched.scheduler.waiting_queue = [Request(2), Request(3)]
    told = []
    for turn in range(5):
        watched.scheduler.round_normal()
        told.append(watched.told())
        if turn == 0:  # another one comes, and ends with its first token
            watched.scheduler.waiting_queue = [Request(1)]
    assert told == [(2, 0, 1, 2), (2, 0, 2, 2), (1, 0, 3, 2), (0, 0, 4, 0), (0, 0, 4, 0)]


def test_each_request_is_counted_once(watch: Watch) -> None:
    watched = watch(OFTEN)
    watched.scheduler.waiting_queue = [Request(9), Request(9)]
    for _ in range(4):
        watched.scheduler.round_overlap()  # its batches are copies
    assert watched.told()[0] == 2


def test_slot_numbers_that_arrive_when_nothing_runs_any_more_are_shown(watch: Watch) -> None:
    arrived = False
    watched = watch(SELDOM, copier=lambda slots: (slots.clone(), lambda: arrived))
    watched.scheduler.waiting_queue = [Request(2)]
    taken = watched.tree.token_to_kv_pool_allocator.alloc(3)
    for _ in range(5):
        watched.scheduler.round_normal()
    assert watched.told() == (0, 0, 2, 0)
    arrived = True
    watched.scheduler.round_normal()
    assert watched.told() == (0, 0, 2, len(taken))


@pytest.mark.parametrize("loop", ["round_normal", "round_overlap"])
def test_requests_of_a_paused_engine_wait(watch: Watch, loop: str) -> None:
    watched = watch(SELDOM)
    scheduler = watched.scheduler
    scheduler.waiting_queue = [Request(9), Request(9)]
    for _ in range(3):
        getattr(scheduler, loop)()
    scheduler.paused = True
    scheduler.waiting_queue = [Request(1)]
    scheduler.round_normal()
    assert watched.told()[:3] == (0, 3, scheduler.steps)


def test_a_fault_in_what_is_told_reaches_no_loop(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    watched = watch(OFTEN)
    caplog.clear()
    watched.scheduler.running_batch.reqs = [SimpleNamespace()]  # type: ignore[list-item]  # of another version
    assert watched.scheduler.process_batch_result(Batch()) == "processed"
    assert watched.scheduler.on_idle() == "idle"
    assert watched.scheduler._record_scheduler_state_for_paused_engine() == "paused"
    (line,) = caplog.messages
    assert "finished" in line
    assert len(watched.attachment.hooks) == 0
    assert watched.read().flags.degraded


@pytest.mark.parametrize("method", ["on_idle", "_record_scheduler_state_for_paused_engine"])
def test_it_can_be_turned_off_where_no_step_ends(watch: Watch, method: str) -> None:
    watched = watch(SELDOM)
    adapter.turn_off("the operator said so")
    getattr(watched.scheduler, method)()
    assert watched.attachment.reason == "the operator said so"
    assert adapter.attachments() == ()


def test_without_steps_changes_are_shown_but_not_at_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop goes round thousands of times a second, and a cache may be emptied meanwhile."""
    monkeypatch.setenv("KVATLAS_DIR", str(tmp_path))
    now = 100.0
    tree = Tree()
    one = Attachment(tree, "", OFTEN, clock=lambda: now)
    one.attach()
    with closing(MapReader(one.pools[0].map.path)) as reader:
        one.rest(0, 0)
        tree.token_to_kv_pool_allocator.alloc(3)
        one.rest(0, 0)
        assert int(reader.read().state_counts[BlockState.USED]) == 0
        now += 2 * REST_SECONDS
        one.rest(0, 0)
        assert int(reader.read().state_counts[BlockState.USED]) == 3
        one.rest(0, 1)  # another number of requests is shown at once
        assert reader.read().waiting_requests == 1
    one.stop("the test is over")
