"""How the dashboard is started: Streamlit's settings, all on the command line, so that no file decides them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import resources

from dashboard.palette import DARK, LIGHT
from dashboard.source import Source

DEFAULT_LISTEN = "127.0.0.1:8501"


def streamlit_command(
    listen: str = DEFAULT_LISTEN,
    agent_url: str | None = None,
    *,
    base_path: str = "",
    prometheus_url: str = "",
    environment: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """The command line and the whole environment of a dashboard process.

    `listen` is HOST:PORT ([HOST]:PORT for IPv6), `agent_url` an http address or several with commas between them,
    `prometheus_url` one or none; ValueError otherwise. `environment` is the process's own where None.
    """
    host, port = split_address(listen)
    # -P keeps the current folder off the module path: a stray agent.py there must not become our agent package.
    page = str(resources.files("dashboard").joinpath("app.py"))
    command = [sys.executable, "-P", "-m", "dashboard.streamlit_server", "run", page]
    for option, value in _options(host, port, base_path).items():
        command.append(f"--{option}={value}")
    child = dict(os.environ if environment is None else environment)
    if agent_url:
        child["KVATLAS_AGENT_URL"] = agent_url
    if prometheus_url:
        child["KVATLAS_PROMETHEUS_URL"] = prometheus_url
    Source.from_environment(child)  # an address that is none is said before anything starts
    return command, child


def split_address(listen: str) -> tuple[str, int]:
    """HOST:PORT in its two parts; ValueError says what is wrong with it."""
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{listen!r} is not an address: give HOST:PORT, as in {DEFAULT_LISTEN}")
    return host, int(port)


def _options(host: str, port: int, base_path: str) -> dict[str, str]:
    options = {
        "server.address": host,
        "server.port": str(port),
        "server.headless": "true",
        "server.fileWatcherType": "none",
        "server.runOnSave": "false",
        "browser.gatherUsageStats": "false",
        "browser.serverAddress": host,
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",
        "global.developmentMode": "false",
        "theme.light.primaryColor": LIGHT.states["used"],
        "theme.dark.primaryColor": DARK.states["used"],
        "theme.baseRadius": "small",
        "theme.baseFontSize": "15",
    }
    if base_path.strip("/"):
        options["server.baseUrlPath"] = base_path.strip("/")
    return options
