"""Sends a stream of requests to an OpenAI server as they arrive in the trace, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx

from agent.demo.shaping import ShapedRequest

MOST_AT_ONCE = 32  # then the next one waits: a client that opens ever more connections shows nothing
REQUEST_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """What came of it so far."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    failure: str = ""  # the first one
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of those: found in the prefix cache, as the server says
    answer_tokens: int = 0
    seconds: float = 0.0  # since the first was sent

    @property
    def tokens_per_second(self) -> float | None:
        """Generated ones; None before the first second has passed."""
        return self.answer_tokens / self.seconds if self.seconds >= 1.0 else None


class Load:
    """`start`, read `figures` at any time, `stop`. Answers are greedy and run to their recorded length."""

    def __init__(self, base_url: str, model: str, requests: Iterator[ShapedRequest], speed: float) -> None:
        """`speed` is seconds of the trace in one second."""
        self._base_url, self._model, self._requests, self._speed = base_url, model, requests, speed
        self._figures = LoadFigures()
        self._began = 0.0
        self._stopping: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="demo-load", daemon=True)
        self._running = threading.Event()

    @property
    def figures(self) -> LoadFigures:
        """A copy, as of now or of the end."""
        if not self._began or not self._thread.is_alive():
            return self._figures
        return replace(self._figures, seconds=time.monotonic() - self._began)

    def start(self) -> None:
        """Send the first request now."""
        self._thread.start()
        self._running.wait()

    def stop(self) -> None:
        """Send nothing more and give up what is not answered yet."""
        if self._loop is not None and self._stopping is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
        if self._thread.ident is not None:
            self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._began = time.monotonic()
        self._running.set()
        limits = httpx.Limits(max_connections=MOST_AT_ONCE, max_keepalive_connections=MOST_AT_ONCE)
        room = asyncio.Semaphore(MOST_AT_ONCE)
        # A neighbour: no proxy stands between.
        async with httpx.AsyncClient(
            base_url=self._base_url, trust_env=False, timeout=REQUEST_SECONDS, limits=limits
        ) as client:
            tasks: set[asyncio.Task[None]] = set()
            stopped = asyncio.create_task(self._stopping.wait())
            for request in self._requests:
                due = self._began + request.arrival_s / self._speed - time.monotonic()
                await asyncio.wait({stopped}, timeout=max(0.0, due))
                entering = asyncio.create_task(room.acquire())
                await asyncio.wait({stopped, entering}, return_when=asyncio.FIRST_COMPLETED)
                if stopped.done():
                    entering.cancel()
                    break
                task = asyncio.create_task(self._send(client, request, room))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            while tasks and not stopped.done():  # there are no more requests: the answers are waited for
                either: set[asyncio.Task[Any]] = {stopped, *tasks}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            stopped.cancel()
        self._figures = replace(self._figures, seconds=time.monotonic() - self._began)

    async def _send(self, client: httpx.AsyncClient, request: ShapedRequest, room: asyncio.Semaphore) -> None:
        body = {
            "model": self._model,
            "prompt": list(request.prompt),
            "max_tokens": request.answer_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        self._figures = replace(self._figures, sent=self._figures.sent + 1)
        try:
            response = await client.post("/v1/completions", json=body)
            response.raise_for_status()
            usage = response.json()["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            now = self._figures
            self._figures = replace(
                now,
                done=now.done + 1,
                prompt_tokens=now.prompt_tokens + usage["prompt_tokens"],
                cached_tokens=now.cached_tokens + cached,
                answer_tokens=now.answer_tokens + usage["completion_tokens"],
            )
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            now, what = self._figures, f"{type(error).__name__}: {error}"
            self._figures = replace(now, failed=now.failed + 1, failure=now.failure or what)
        finally:
            room.release()
