"""Starts the dashboard in the foreground: `python -P -m dashboard --listen HOST:PORT --agent URL`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from dashboard.launch import DEFAULT_LISTEN, streamlit_command


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Becomes the Streamlit process; exits with 2 where an argument is wrong."""
    parser = argparse.ArgumentParser(prog="python -P -m dashboard", description="KVAtlas dashboard")
    parser.add_argument(
        "--listen",
        default=os.environ.get("KVATLAS_DASHBOARD_LISTEN", DEFAULT_LISTEN),
        help="HOST:PORT to serve the page on (default %(default)s; env KVATLAS_DASHBOARD_LISTEN)",
    )
    parser.add_argument(
        "--agent",
        action="append",
        metavar="URL[,URL]",
        help="an agent's address, or several (env KVATLAS_AGENT_URL; default port 9477); may be given more than once",
    )
    parser.add_argument(
        "--prometheus",
        default=os.environ.get("KVATLAS_PROMETHEUS_URL", ""),
        metavar="URL",
        help="a Prometheus that scrapes agents: its pools are on the fleet's view too (env KVATLAS_PROMETHEUS_URL)",
    )
    parser.add_argument(
        "--base-path",
        default=os.environ.get("KVATLAS_DASHBOARD_BASE_PATH", ""),
        help="path in front of the page where a proxy serves it (env KVATLAS_DASHBOARD_BASE_PATH)",
    )
    options = parser.parse_args(arguments)
    try:
        command, environment = streamlit_command(
            options.listen,
            ",".join(options.agent or ()),
            base_path=options.base_path,
            prometheus_url=options.prometheus,
        )
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    os.execve(command[0], command, environment)  # noqa: S606 - this process is the server from here on


if __name__ == "__main__":
    main()
