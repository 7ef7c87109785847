"""An engine's metrics endpoint that answers as it is told: a real HTTP server, whose answers may be broken."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest


@dataclass
class Endpoint:
    """Sends `answer()` as it is, each time that it is asked; nothing and no end where that is None."""

    answer: Callable[[], bytes | None]
    asked: list[bytes] = field(default_factory=list)
    url: str = ""
    _listener: socket.socket = field(default_factory=socket.socket)
    _open: list[socket.socket] = field(default_factory=list)

    def start(self) -> None:
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(32)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            request = b""
            while b"\r\n\r\n" not in request and (data := connection.recv(65_536)):
                request += data
            self.asked.append(request)
            said = self.answer()
            if said is None:
                self._open.append(connection)  # and never answered
            else:
                with connection:
                    connection.sendall(said)

    def end(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            connection.close()


def http(body: bytes | str, status: str = "200 OK", *headers: str, length: int | None = None) -> bytes:
    """An answer with this body, and a length that may be a lie."""
    data = body.encode() if isinstance(body, str) else body
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(data) if length is None else length}", "Connection: close"]
    return "\r\n".join([*head, *headers, "", ""]).encode() + data


@pytest.fixture
def endpoint() -> Iterator[Callable[[Callable[[], bytes | None]], Endpoint]]:
    made: list[Endpoint] = []

    def start(answer: Callable[[], bytes | None]) -> Endpoint:
        made.append(Endpoint(answer))
        made[-1].start()
        return made[-1]

    yield start
    for one in made:
        one.end()
