"""A receiver that holds to Slack's documented limits for incoming webhooks, and fails as it is told to.

https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks and .../reference/block-kit/blocks
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET_PATH = "/services/T0KVATLAS/B0SECRET/xoxSecretOfTheWebhook"
BLOCK_KEYS = {
    "header": {"type", "text", "block_id"},
    "section": {"type", "text", "block_id", "fields", "accessory", "expand"},
    "context": {"type", "elements", "block_id"},
    "divider": {"type", "block_id"},
}
MOST_TEXT = 40_000


@dataclass(frozen=True, slots=True)
class Answer:
    """What to answer instead of what Slack would; `hang` answers nothing until the receiver closes."""

    status: int = 200
    body: str = "ok"
    headers: Mapping[str, str] = field(default_factory=dict)
    hang: bool = False
    drop: bool = False  # the connection, without a word


@dataclass(frozen=True, slots=True)
class Request:
    """One request, with the answer that it got."""

    at: float  # monotonic
    path: str
    headers: Mapping[str, str]  # names in lower case
    body: Any
    status: int  # 0 where there was no answer
    answer: str


class Receiver:
    """Serves on a free port of loopback. `judge` answers a body; what it accepts with 200 was delivered."""

    def __init__(self, judge: Callable[[Any], Answer]) -> None:
        self._judge = judge
        self._changed = threading.Condition()
        self._script: list[Answer] = []
        self.choose: Callable[[], Answer | None] = lambda: None  # asked where the script is at its end
        self.requests: list[Request] = []
        self._closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{SECRET_PATH}"

    def script(self, *answers: Answer) -> None:
        """The next answers, in this order, whatever is posted."""
        with self._changed:
            self._script += answers

    @property
    def delivered(self) -> list[Any]:
        """Bodies that were accepted."""
        with self._changed:
            return [request.body for request in self.requests if request.status == 200]

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        """Until a request has made it true."""
        with self._changed:
            if not self._changed.wait_for(condition, seconds):
                raise TimeoutError(f"after {len(self.requests)} requests: {self.requests[-3:]}")

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def _decide(self, body: Any) -> Answer:
        with self._changed:
            if self._script:
                return self._script.pop(0)
        return self.choose() or self._judge(body)

    def _record(self, request: Request) -> None:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()

    def _handler(receiver: Receiver) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - the handler has its own self
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                at = time.monotonic()
                try:
                    body = json.loads(raw)
                except ValueError:
                    body = None
                answer = receiver._decide(body)
                silent = answer.hang or answer.drop
                headers = {name.lower(): value for name, value in self.headers.items()}
                status = 0 if silent else answer.status
                receiver._record(Request(at, self.path, headers, body, status, answer.body))
                if answer.hang:
                    receiver._closing.wait()
                if silent:
                    self.close_connection = True
                    return
                encoded = answer.body.encode()
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(encoded)))
                with suppress(OSError):  # the sender may have been killed meanwhile
                    self.end_headers()
                    self.wfile.write(encoded)

            def do_GET(self) -> None:
                self.send_error(405)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


def slack_judge(body: Any) -> Answer:
    """What Slack says to a message."""
    if not isinstance(body, dict):
        return Answer(400, "invalid_payload")
    text, blocks = body.get("text"), body.get("blocks")
    if not text and not blocks:
        return Answer(400, "no_text")
    if text is not None and (not isinstance(text, str) or len(text) > MOST_TEXT):
        return Answer(400, "invalid_payload")
    if blocks is not None and (reason := wrong_blocks(blocks)):
        return Answer(400, "invalid_blocks", {"X-Why": reason})
    return Answer()


def wrong_blocks(blocks: Any) -> str:
    """Why Slack would refuse them; "" where it would not."""
    if not isinstance(blocks, list) or not 1 <= len(blocks) <= 50:
        return "between 1 and 50 blocks"
    for number, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in BLOCK_KEYS or not set(block) <= BLOCK_KEYS[kind]:
            return f"block {number}: {block!r}"
        if kind == "header" and (reason := wrong_text(block.get("text"), 150, ("plain_text",))):
            return f"block {number}: {reason}"
        if kind == "section" and (reason := wrong_text(block.get("text"), 3000)):
            return f"block {number}: {reason}"
        if kind == "context":
            elements = block.get("elements")
            if not isinstance(elements, list) or not 1 <= len(elements) <= 10:
                return f"block {number}: between 1 and 10 elements"
            if reason := next(filter(None, (wrong_text(element, 3000) for element in elements)), ""):
                return f"block {number}: {reason}"
    return ""


def wrong_text(found: Any, longest: int, kinds: tuple[str, ...] = ("plain_text", "mrkdwn")) -> str:
    """Of a text object; lengths in UTF-16 units, the strictest reading of Slack's "characters"."""
    if not isinstance(found, dict) or found.get("type") not in kinds or not isinstance(found.get("text"), str):
        return f"no text object: {found!r}"
    allowed = {"type", "text", "emoji"} if found["type"] == "plain_text" else {"type", "text", "verbatim"}
    if not set(found) <= allowed:
        return f"unknown keys {set(found) - allowed}"
    length = len(found["text"].encode("utf-16-le", "surrogatepass")) // 2
    return "" if 1 <= length <= longest else f"{length} characters, between 1 and {longest}"
