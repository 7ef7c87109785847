"""Who may change something from the page, and how it is asked for."""

from __future__ import annotations

import threading

import pytest

from agent.client import AgentClient, AgentUnavailable
from dashboard import jobs
from dashboard.local_page import is_local
from dashboard.operator_token import is_token
from dashboard.views import compaction

PATIENCE_SECONDS = 120.0


@pytest.mark.parametrize("host", ["localhost:8501", "127.0.0.1:8501", "[::1]:8501", "localhost"])
def test_a_page_of_this_machine_is_local(host: str) -> None:
    assert is_local("127.0.0.1", {"Host": host})
    assert is_local("127.0.0.1", {"Host": host, "Origin": f"http://{host}"})


@pytest.mark.parametrize(
    ("address", "headers"),
    [
        ("0.0.0.0", {"Host": "localhost:8501"}),  # noqa: S104 - what it must not trust
        (None, {"Host": "localhost:8501"}),
        ("127.0.0.1", {"Host": "kv.example:80"}),  # a name that somebody's DNS leads here
        ("127.0.0.1", {"Host": "localhost.example"}),
        ("127.0.0.1", {"Host": "localhost:8501", "X-Forwarded-For": "10.0.0.1"}),
        ("127.0.0.1", {"host": "localhost:8501", "forwarded": "for=10.0.0.1"}),
        ("127.0.0.1", {}),
        ("127.0.0.1", {"Host": "localhost:8501", "Origin": "http://localhost:3000"}),  # another server's page
        ("127.0.0.1", {"Host": "127.0.0.1:8501", "Origin": "http://localhost:8501"}),
        ("127.0.0.1", {"Host": "localhost:8501", "Origin": "null"}),
        ("127.0.0.1", {"Host": "localhost:8501", "Origin": ""}),
        ("127.0.0.1", {"Host": "[::1", "Origin": "http://[::1"}),
    ],
)
def test_any_other_page_is_not(address: str | None, headers: dict[str, str]) -> None:
    assert not is_local(address, headers)


def test_a_token_is_what_a_header_can_carry() -> None:
    assert is_token("0a-b_c.d~e+f/=")
    for text in ("two words", "naïve", "line\nbreak", "nul\0"):
        assert not is_token(text)


def test_a_job_ends_with_its_answer_and_closes_its_client() -> None:
    writer, begin = AgentClient("http://127.0.0.1:9"), threading.Event()

    def call(client: AgentClient) -> str:
        assert client is writer
        assert begin.wait(PATIENCE_SECONDS)
        return "done"

    job = jobs.start("Run", writer, call)
    assert not job.done.is_set()
    begin.set()
    assert job.done.wait(PATIENCE_SECONDS)
    assert (job.answer, job.error, job.agent) == ("done", None, "http://127.0.0.1:9")
    assert job.seconds >= 0
    with pytest.raises(RuntimeError, match="closed"):
        writer.engines()


def test_a_job_ends_with_what_hindered_it() -> None:
    job = jobs.start("Run", AgentClient("http://127.0.0.1:9"), lambda client: client.engines())
    assert job.done.wait(PATIENCE_SECONDS)
    assert isinstance(job.error, AgentUnavailable)
    assert job.answer is None


def test_a_job_ends_also_where_no_thread_may_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    writer, asked = AgentClient("http://127.0.0.1:9"), threading.Event()
    monkeypatch.setattr(threading.Thread, "start", start)
    job = jobs.start("Run", writer, lambda _: asked.set())
    assert job.done.is_set()
    assert isinstance(job.error, jobs.NotAsked)
    assert "can't start new thread" in str(job.error)
    assert not asked.is_set()
    assert "Nothing was changed" in compaction.hindrance(job.error).what
    with pytest.raises(RuntimeError, match="closed"):
        writer.engines()
