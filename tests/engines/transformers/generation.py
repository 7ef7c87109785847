"""A real continuous batching manager over a model, its watched processor, and requests for it."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable
from typing import Any

from cache_truth import Truth  # type: ignore[import-not-found]
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from engine_shim import MapReader
from engine_shim.adapters import transformers as adapter

PAGE = 8
PREFIX_TOKENS = 40
ANSWER_TIMEOUT_SECONDS = 600.0

Requests = dict[str, list[int]]


class Log(logging.Handler):
    """What our logger said since somebody took it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []
        logging.getLogger("kvatlas.shim").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def take(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines


def requests(count: int, *, seed: int = 3, longest: int = 40) -> Requests:
    """Prompts of random tokens, two of three with a part of one prefix; some come twice, so that answers do as well."""
    dice = random.Random(seed)
    prefix = [dice.randrange(3, 500) for _ in range(PREFIX_TOKENS)]
    made: Requests = {}
    for number in range(count):
        start = prefix[: dice.choice([0, 2 * PAGE, PREFIX_TOKENS])]
        made[f"r{number}"] = start + [dice.randrange(3, 500) for _ in range(dice.randrange(3, longest))]
        if number % 5 == 4:
            made[f"r{number}"] = list(made[f"r{number - 1}"])
    return made


class Generation:
    """One manager and its processor, made and not started. `at_each_step` is called where the maps are up to date."""

    def __init__(self, model: Any, *, blocks: int, answer: int = 20, sequences: int = 1, **settings: Any) -> None:
        config = ContinuousBatchingConfig(
            **{
                "page_size": PAGE,
                "num_blocks": blocks,
                "max_batch_tokens": 64,
                "use_async_batching": False,
                "use_cuda_graph": False,
                "seed": 5,
            }
            | settings
        )
        # Several answers to one prompt must be drawn: with a seed, and all requests at the start, the same each time.
        wanted = GenerationConfig(
            max_new_tokens=answer, do_sample=sequences > 1, eos_token_id=-1, num_return_sequences=sequences
        )
        before = set(adapter.attachments())
        self.sequences = sequences
        self.manager = model.init_continuous_batching(generation_config=wanted, continuous_batching_config=config)
        self.manager.warmup()
        self.processor = self.manager.batch_processor
        new = [one for one in adapter.attachments() if one not in before]
        self.attachment = new[0] if new else None

    def readers(self) -> list[MapReader]:
        assert self.attachment is not None
        return [MapReader(observer.path) for observer in self.attachment.observers if observer.path is not None]

    def truth(self) -> Truth:
        return Truth(self.processor, *self.readers())

    def at_each_step(self, then: Callable[[], None]) -> None:
        """Call `then` after each step, on the thread that generates. What it raises ends the generation."""
        step = self.processor.update_batch

        def update_batch() -> None:
            step()
            then()

        self.processor.update_batch = update_batch

    def serve(self, wanted: Requests, *, cancel: frozenset[str] = frozenset(), **limits: Any) -> dict[str, list[int]]:
        """Tokens by request. The requests in `cancel` are given up after a while, and have no tokens."""
        for name, tokens in wanted.items():
            self.manager.add_request(tokens, request_id=name, **limits)
        self.manager.start()
        found: dict[str, list[int]] = {}
        left = {
            child
            for name in wanted
            for child in (name, *(f"{name}__child#{number}" for number in range(self.sequences - 1)))
        } - cancel
        while left:
            result = self.manager.get_result(timeout=ANSWER_TIMEOUT_SECONDS)
            if result is None:
                raise RuntimeError(
                    f"no answer for {sorted(left)}: {self.manager.background_thread_status.fatal_error!r}"
                )
            found[result.request_id] = list(result.generated_tokens)
            left.discard(result.request_id)
            for name in cancel:
                self.manager.cancel_request(name)
            cancel = frozenset()
        return found

    def rest(self) -> None:
        """End the generating thread; the processor, its cache and its maps stay."""
        self.manager.stop(block=True, keep_for_next_session=True)
        del self.manager.model._cached_continuous_batching_manager

    def stop(self) -> None:
        """End the generating thread and forget the processor."""
        if self.manager.is_running():
            self.manager.stop(block=True)
        self.manager.batch_processor = self.processor = self.attachment = None
        gc.collect()
