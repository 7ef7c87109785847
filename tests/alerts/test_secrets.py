"""A webhook's URL appears nowhere: not in logs, errors, tracebacks, metrics, the store or what the process prints."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from alerts.errors import AlertsConfigError
from alerts.sinks.alertmanager import AlertmanagerSink
from alerts.sinks.http import Poster, Unanswered
from alerts.sinks.secret_url import SecretUrl, is_loopback
from alerts.sinks.slack import SlackSink
from tests.alerts.slack_receiver import SECRET_PATH, Answer, Receiver

SECRET = SECRET_PATH.rsplit("/", 1)[1]
EVERYTHING = """
import logging, sys, time, traceback
from pathlib import Path
logging.basicConfig(level=logging.NOTSET, stream=sys.stdout)
import faulthandler
from alerts.backoff import Backoff
from alerts.grouping import Cadence
from alerts.pipeline import Pipeline
from alerts.sinks.secret_url import SecretUrl
from alerts.sinks.slack import SlackSink
from alerts.store import Store
from tests.alerts.conftest import fired, make_alert

url = SecretUrl.read(what="slack", file=Path(sys.argv[1]))
print(repr(url), str(url), f"{url!r:>60} {url}")
cadence = Cadence(collect_seconds=0.0, group_seconds=0.0, per_second=1000)
store = Store(Path(sys.argv[2]), ["slack"])
sink = SlackSink("slack", url, cadence=cadence, timeout_seconds=5.0, proxy="none")
pipeline = Pipeline(store, [sink], backoff=Backoff(first_seconds=0.01, longest_seconds=0.02))
pipeline.start()
store.commit({}, [fired(make_alert())])
deadline = time.monotonic() + 120
while pipeline.outcomes()["slack", "sent"] < 1 and time.monotonic() < deadline:
    time.sleep(0.02)
print(pipeline.outcomes(), pipeline.health(), sink, vars(sink), vars(pipeline), vars(store))
pipeline.stop()
try:
    sink._client._poster.post(b"x", {})
    raise RuntimeError("no error")
except Exception:
    traceback.print_exc(file=sys.stdout)
"""


def test_a_process_with_all_logging_on_never_prints_it(
    slack: Receiver, tmp_path: Path, path: Path, repository_root: Path
) -> None:
    slack.script(
        Answer(500, "error"),
        Answer(302, "", {"Location": slack.url}),
        Answer(429, "", {"Retry-After": "0"}),
        Answer(drop=True),
        Answer(hang=True),
        Answer(400, "invalid_blocks"),
        Answer(200, "ok"),
        Answer(drop=True),
    )
    (tmp_path / "url").write_text(slack.url + "\n")
    code = [sys.executable, "-X", "dev", "-c", EVERYTHING, str(tmp_path / "url"), str(path)]
    ended = subprocess.run(
        code, capture_output=True, text=True, cwd=repository_root, env={"PYTHONPATH": str(repository_root)}, check=True
    )
    printed = ended.stdout + ended.stderr
    assert len(slack.delivered) == 1
    assert "notice_not_delivered" in printed
    assert "Unanswered: connection_broken" in printed
    assert SECRET not in printed
    assert SECRET_PATH[:20] not in printed
    for file in path.parent.iterdir():
        assert SECRET.encode() not in file.read_bytes()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (f"http://hooks.slack.com{SECRET_PATH}", "plain HTTP"),
        (f"hooks.slack.com{SECRET_PATH}", "not a URL"),
        (f"ftp://hooks.slack.com{SECRET_PATH}", "not a URL"),
        (f"https://{SECRET_PATH}", "not a URL"),
        (f"https://hooks.slack.com:port{SECRET_PATH}", "not a URL"),
        (f"https://[hooks{SECRET_PATH}", "not a URL"),
        (f"https://hooks.slack.com/x {SECRET_PATH}", "spaces"),
        (f"https://hooks.slack.com/\u2026{SECRET_PATH}", "spaces"),
        (f"https://hooks.slack.com/\x00{SECRET_PATH}", "spaces"),
    ],
)
def test_a_url_that_will_not_do_is_refused_without_being_named(url: str, why: str) -> None:
    with pytest.raises(AlertsConfigError, match=why) as caught:
        SecretUrl(url, what="slack_webhook_url")
    told = "".join(traceback.format_exception(caught.value))
    assert SECRET not in told
    assert "slack_webhook_url" in told


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "[::1]", "a.localhost"])
def test_plain_http_may_stay_on_the_machine(host: str) -> None:
    assert SecretUrl(f"http://{host}:9093/x", what="x").host == host.strip("[]")


@pytest.mark.parametrize("host", ["localhost.evil.example", "128.0.0.1", "hooks.slack.com", "127.0.0.1.nip.example"])
def test_a_name_that_looks_like_loopback_is_not(host: str) -> None:
    assert not is_loopback(host)


def test_it_is_read_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "url").write_text(f"https://hooks.slack.com{SECRET_PATH}\n")
    assert SecretUrl.read(what="x", file=tmp_path / "url").reveal() == f"https://hooks.slack.com{SECRET_PATH}"
    monkeypatch.setenv("KVATLAS_X", f"https://hooks.slack.com{SECRET_PATH}")
    assert SecretUrl.read(what="x", variable="KVATLAS_X").reveal().endswith(SECRET_PATH)
    with pytest.raises(AlertsConfigError, match="cannot be read"):
        SecretUrl.read(what="x", file=tmp_path / "none")
    (tmp_path / "url").write_bytes(b"\xff\xfe" + SECRET.encode())
    with pytest.raises(AlertsConfigError, match="does not hold a URL") as caught:
        SecretUrl.read(what="x", file=tmp_path / "url")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("host", ["xn--a-.example", "a..example", "-" + "a" * 70 + ".example"])
def test_a_host_that_cannot_be_is_refused_at_once(host: str) -> None:
    """Found out while sending it would cost each message."""
    with pytest.raises(AlertsConfigError, match="a host that cannot be") as caught:
        SlackSink("slack", SecretUrl(f"https://{host}{SECRET_PATH}", what="x"), proxy="none")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_of_alertmanager_the_address_alone_is_taken() -> None:
    with pytest.raises(AlertsConfigError, match=r"without \? and #") as caught:
        AlertmanagerSink("alertmanager", SecretUrl(f"http://127.0.0.1:9093/?token={SECRET}", what="x"), proxy="none")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_of_a_file_without_an_end_the_beginning_is_read() -> None:
    with pytest.raises(AlertsConfigError, match="no URL has"):
        SecretUrl.read(what="x", file=Path("/dev/zero"))


def test_it_is_not_written_down() -> None:
    with pytest.raises(TypeError):
        pickle.dumps(SecretUrl("https://a.example/b", what="x"))


def test_no_logger_of_a_library_is_told_the_url(
    receiver: Receiver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.NOTSET)
    receiver.script(Answer(302, "", {"Location": receiver.url}), Answer(drop=True))
    poster = Poster(SecretUrl(receiver.url, what="x"), proxy="none")
    assert poster.post(b"{}", {}).status == 302
    with pytest.raises(Unanswered):
        poster.post(b"{}", {})
    assert SECRET not in caplog.text
    # A control: the library would have told it.
    monkeypatch.setattr(logging.getLogger("httpcore"), "level", logging.DEBUG)
    logging.getLogger("httpcore")._cache.clear()  # type: ignore[attr-defined]
    for name in ("connection", "http11"):
        logging.getLogger(f"httpcore.{name}")._cache.clear()  # type: ignore[attr-defined]
    receiver.script(Answer(302, "", {"Location": receiver.url}))
    poster.post(b"{}", {})
    assert SECRET in caplog.text
