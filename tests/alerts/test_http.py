"""One POST: what statuses mean, proxies, and receivers that answer late, drop by drop, too much or not at all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from email.utils import formatdate
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alerts.backoff import Backoff, TokenBucket, parse_retry_after
from alerts.errors import AlertsConfigError
from alerts.sinks.base import Permanent, Reason, Retry, Sent, Shrink
from alerts.sinks.http import MOST_REPLY_BYTES, Poster, Proxy, Reply, Unanswered, classify
from alerts.sinks.secret_url import SecretUrl
from tests.alerts.conftest import START
from tests.alerts.slack_receiver import Answer, Receiver


def poster(url: str, proxy: Proxy = "none", timeout: float = 60.0) -> Poster:
    return Poster(SecretUrl(url, what="x", plain_http=True), timeout_seconds=timeout, proxy=proxy)


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, Sent()),
        (202, Sent()),
        (302, Retry(Reason.REDIRECTED, None, 302)),
        (400, Shrink(Reason.INVALID_MESSAGE, 400)),
        (401, Permanent(Reason.FORBIDDEN, 401)),
        (403, Permanent(Reason.FORBIDDEN, 403)),
        (404, Permanent(Reason.GONE, 404)),
        (407, Retry(Reason.PROXY, None, 407)),
        (408, Retry(Reason.SERVER_ERROR, 7.0, 408)),
        (410, Permanent(Reason.GONE, 410)),
        (413, Shrink(Reason.INVALID_MESSAGE, 413)),
        (418, Permanent(Reason.REJECTED, 418)),
        (429, Retry(Reason.RATE_LIMITED, 7.0, 429)),
        (500, Retry(Reason.SERVER_ERROR, 7.0, 500)),
        (503, Retry(Reason.SERVER_ERROR, 7.0, 503)),
    ],
)
def test_what_a_status_means(status: int, outcome: object) -> None:
    assert classify(Reply(status, {"retry-after": "7"}, b""), lambda: START) == outcome


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("30", 30.0),
        (" 0 ", 0.0),
        ("1.5", 1.5),
        ("-3", 0.0),
        (formatdate(START + 90, usegmt=True), 90.0),
        (formatdate(START - 90, usegmt=True), 0.0),
        ("soon", None),
        ("", None),
        ("nan", None),
        ("inf", None),
        (None, None),
    ],
)
def test_retry_after_is_a_number_or_a_date(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value, START) == seconds


@given(st.integers(0, 10_000), st.integers())
def test_back_off_grows_to_its_end_and_is_never_short(attempt: int, seed: int) -> None:
    delay = Backoff(first_seconds=1.0, longest_seconds=300.0).delay(attempt, None, Random(seed))
    whole = min(300.0, 2.0 ** min(max(attempt - 1, 0), 60))
    assert whole / 2 <= delay <= whole


@given(st.floats(-1e9, 1e12), st.integers())
def test_a_receiver_that_says_how_long_is_obeyed_within_reason(asked: float, seed: int) -> None:
    delay = Backoff().delay(5, asked, Random(seed))
    obeyed = max(0.0, min(asked, 3600.0))
    assert obeyed <= delay <= obeyed * 1.1 + 0.1


@given(st.lists(st.floats(0.0, 5.0), max_size=60), st.integers(1, 5))
def test_the_bucket_lets_no_more_through_than_it_should(pauses: list[float], burst: int) -> None:
    now, bucket, taken = 0.0, TokenBucket(1.0, burst, now=0.0), []
    for pause in pauses:
        now = max(now + pause, bucket.ready_at(now + pause))
        bucket.take(now)
        taken.append(now)
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + (taken[last] - taken[first]) + 1e-6


def test_only_what_is_asked_of_it_is_sent(receiver: Receiver) -> None:
    reply = poster(receiver.url).post(b'{"a": 1}', {"Content-Type": "application/json"})
    assert (reply.status, reply.text) == (200, "ok")
    assert receiver.requests[0].body == {"a": 1}
    assert receiver.requests[0].headers["connection"] == "close"


def test_a_redirect_is_not_followed(receiver: Receiver) -> None:
    receiver.script(Answer(302, "", {"Location": receiver.url}))
    assert poster(receiver.url).post(b"{}", {}).status == 302
    assert len(receiver.requests) == 1


def test_a_name_and_a_password_in_the_url_are_sent_as_such(receiver: Receiver) -> None:
    poster(receiver.url.replace("//", "//ada:p%40ss@")).post(b"{}", {})
    assert receiver.requests[0].headers["authorization"] == "Basic YWRhOnBAc3M="


def test_of_a_long_answer_the_beginning_is_read(receiver: Receiver) -> None:
    receiver.script(Answer(500, "x" * 3_000_000))
    assert len(poster(receiver.url).post(b"{}", {}).body) == MOST_REPLY_BYTES


@pytest.fixture
def dripping() -> Iterator[str]:
    """URL of one that sends a byte of a header now and then, for ever."""
    ended = threading.Event()
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                with closing(connection), suppress(OSError):
                    connection.sendall(b"HTTP/1.1 200 OK\r\n")
                    while not ended.wait(0.05):
                        connection.sendall(b"X")

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}/"
    ended.set()
    server.close()


def test_a_receiver_that_drips_is_cut_off(dripping: str) -> None:
    with pytest.raises(Unanswered) as caught:
        poster(dripping, timeout=0.5).post(b"{}", {})
    assert caught.value.reason is Reason.TIMEOUT


def test_one_that_does_not_answer_is_a_timeout(receiver: Receiver) -> None:
    receiver.script(Answer(hang=True))
    with pytest.raises(Unanswered) as caught:
        poster(receiver.url, timeout=0.2).post(b"{}", {})
    assert caught.value.reason is Reason.TIMEOUT


def test_one_that_is_not_there_is_unreachable() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    for url, reason in (
        (f"http://127.0.0.1:{port}/", Reason.UNREACHABLE),
        ("http://nowhere.invalid/", Reason.UNREACHABLE),
    ):
        with pytest.raises(Unanswered) as caught:
            poster(url).post(b"{}", {})
        assert caught.value.reason is reason


def test_one_that_speaks_no_tls_is_unreachable(receiver: Receiver) -> None:
    with pytest.raises(Unanswered) as caught:
        poster(receiver.url.replace("http://", "https://"), timeout=2.0).post(b"{}", {})
    assert caught.value.reason in (Reason.UNREACHABLE, Reason.BROKEN)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A proxy that answers in the place of who is asked, so that a request through it is seen."""
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    answering = Receiver(lambda _: Answer(204, ""))
    yield answering
    answering.close()


ELSEWHERE = "http://alertmanager.example:9093/api"


def test_each_sink_has_its_own_proxy(proxy: Receiver, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"http://127.0.0.1:{proxy.port}"
    own = SecretUrl(address.replace("//", "//user:secret@"), what="proxy", plain_http=True)
    assert poster(ELSEWHERE, own).post(b"{}", {}).status == 204
    assert proxy.requests[0].path == ELSEWHERE
    assert proxy.requests[0].headers["proxy-authorization"].startswith("Basic ")
    monkeypatch.setenv("HTTP_PROXY", address)
    monkeypatch.setenv("http_proxy", address)
    assert poster(ELSEWHERE, "environment").post(b"{}", {}).status == 204
    assert poster(receiver.url, "none").post(b"{}", {}).status == 200
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert poster(receiver.url, "environment").post(b"{}", {}).status == 200
    assert (len(proxy.requests), len(receiver.requests)) == (2, 2)


def test_a_proxy_that_refuses_is_named_as_the_cause(proxy: Receiver) -> None:
    own = SecretUrl(f"http://127.0.0.1:{proxy.port}", what="proxy", plain_http=True)
    with pytest.raises(Unanswered) as caught:
        poster("https://hooks.example/x", own).post(b"{}", {})  # the receiver knows no CONNECT
    assert caught.value.reason is Reason.PROXY


def test_a_proxy_of_no_known_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "gopher://proxy.example")
    with pytest.raises(AlertsConfigError, match="proxy"):
        poster(ELSEWHERE, "environment")
