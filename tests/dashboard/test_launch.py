"""How the dashboard is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from streamlit import net_util
from streamlit.runtime.media_file_manager import MediaFileManager
from streamlit.web import cli
from streamlit.web.server import server_util

from dashboard import streamlit_server
from dashboard.launch import split_address, streamlit_command
from dashboard.source import Source


def test_command_keeps_to_itself() -> None:
    command, environment = streamlit_command("127.0.0.1:8600", "http://127.0.0.1:1", environment={"HOME": "/h"})
    assert command[1:5] == ["-P", "-m", "dashboard.streamlit_server", "run"]
    assert Path(command[5]).is_file()
    assert {
        "--server.address=127.0.0.1",
        "--server.port=8600",
        "--server.headless=true",
        "--server.fileWatcherType=none",
        "--browser.gatherUsageStats=false",
    } <= set(command)
    assert not any("baseUrlPath" in part for part in command)
    assert environment == {"HOME": "/h", "KVATLAS_AGENT_URL": "http://127.0.0.1:1"}


def test_an_origin_of_elsewhere_is_refused_without_asking_the_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def outside(url: str, *_: object, **__: object) -> None:
        asked.append(url)

    def let_in(**_: object) -> None:
        assert not server_util.is_url_from_allowed_origins("http://kv.example")

    monkeypatch.setattr(net_util, "_make_blocking_http_get", outside)
    name = "_remove_orphaned_deferred_callables"
    for owner, changed in ((net_util, "get_external_ip"), (MediaFileManager, name)):
        monkeypatch.setattr(owner, changed, getattr(owner, changed))  # is put back afterwards
    let_in()
    assert asked  # by Streamlit itself
    asked.clear()
    monkeypatch.setattr(cli, "main", let_in)
    stock = getattr(MediaFileManager, name)
    streamlit_server.main()
    assert asked == []
    assert getattr(MediaFileManager, name) is not stock  # see pending_downloads.py


def test_base_path_has_no_slashes_around_it() -> None:
    command, _ = streamlit_command(base_path="/mem/")
    assert "--server.baseUrlPath=mem" in command


@pytest.mark.parametrize(
    ("text", "address"), [("127.0.0.1:8501", ("127.0.0.1", 8501)), ("[::1]:80", ("::1", 80)), ("host:1", ("host", 1))]
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address


@pytest.mark.parametrize("text", ["8501", ":8501", "host:", "host:0", "host:70000", "host:http", ""])
def test_a_wrong_address_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="give HOST:PORT"):
        split_address(text)


def test_a_wrong_address_ends_the_command_with_2() -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-m", "dashboard", "--listen", "nowhere"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr == "error: 'nowhere' is not an address: give HOST:PORT, as in 127.0.0.1:8501\n"


@pytest.mark.parametrize("url", ["http://[::1", "nonsense", f"http://{'a' * 64}.x"])
def test_an_agent_s_address_is_checked_at_the_start(url: str) -> None:
    with pytest.raises(ValueError, match="KVATLAS_AGENT_URL is no address"):
        streamlit_command(agent_url=url, environment={})
    with pytest.raises(ValueError, match="KVATLAS_AGENT_URL is no address"):
        streamlit_command(environment={"KVATLAS_AGENT_URL": url})
    with pytest.raises(ValueError, match="KVATLAS_AGENT_URL is no address"):
        Source.from_environment({"KVATLAS_AGENT_URL": url})


@pytest.mark.parametrize(
    "url", ["http://user:secret@host:1", "http://user:secret@[::1", "http://user:se@cret@host/x@y"]
)
def test_an_error_on_the_page_has_no_password(url: str) -> None:
    told = Source((url,), False).reason(OSError(f"no answer from {url}"))
    assert "cret@" not in told
    assert "user" not in told
