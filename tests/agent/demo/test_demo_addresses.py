"""The demo says where its page, its agent and its maps are."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from agent.demo.screen import Screen


@pytest.mark.parametrize("page", ["http://127.0.0.1:8501", None])
def test_addresses_are_printed(page: str | None) -> None:
    out = io.StringIO()
    with Screen(console=Console(file=out, width=80, highlight=False, soft_wrap=True)) as screen:
        screen.started("http://127.0.0.1:9477", page, Path("/dev/shm/kvatlas-0/demo-x"))
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("Dashboard")] == ([page] if page else [])
    assert [line.split()[1] for line in lines if line.startswith("Agent")] == ["http://127.0.0.1:9477"]
