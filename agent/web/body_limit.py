"""Bounds the body of every request: the framework reads it whole, before it is known who sends it."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agent.web.errors import ApiError

MAX_BODY_BYTES = 4 << 20  # a model's config.json, the largest that is ever sent, has some kilobytes


class BodyLimit:
    """Refuses a body beyond the limit with 413, by the length that it claims or once it has come so far."""

    def __init__(self, app: ASGIApp, most: int = MAX_BODY_BYTES) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        claimed = dict(scope["headers"]).get(b"content-length", b"0")
        got = 0

        async def counted() -> Message:
            nonlocal got
            # Raised where the route reads, so that it is answered as every other refusal.
            if claimed.isdigit() and (len(claimed) > 18 or int(claimed) > self._most):
                raise self._too_large()
            message = await receive()
            got += len(message.get("body", b""))
            if got > self._most:
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            "too_large",
            f"the body is larger than {self._most >> 10} KiB",
            "send less; of a model its config.json alone, without weights or tokenizer",
        )
