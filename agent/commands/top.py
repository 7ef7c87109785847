"""`kvatlas top`: the pools of an agent in a terminal, live or once."""

from __future__ import annotations

import codecs
import json
import locale
import os
import sys
from contextlib import suppress
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console

from agent.client import DEFAULT_URL, AgentClient, AgentRefused, AgentUnavailable, agent_address
from agent.terminal.detail import bar_columns
from agent.terminal.live import watch
from agent.terminal.reading import Look, take
from agent.terminal.screen import BAR_ROWS, Frame, lay_out
from agent.terminal.words import ASCII, UNICODE, Glyphs
from engine_shim.errors import KvatlasError, SettingsError

LEAST_SECONDS, MOST_SECONDS = 0.1, 3600.0
TIMEOUT_SECONDS = 10.0  # of an answer; a live screen says sooner that there is none, and goes on asking
LIVE_TIMEOUT_SECONDS = 3.0
JSON_COLUMNS = 4096  # the finest bar: of a million blocks, 1,024 cells


class NoSuchPool(KvatlasError):
    """The agent does not list it; the text names what it lists."""


def top(
    agent: Annotated[str, typer.Option(envvar="KVATLAS_AGENT_URL", help="Address of the agent.")] = DEFAULT_URL,
    pool: Annotated[
        str | None, typer.Option(envvar="KVATLAS_TOP_POOL", help="Pool or engine to begin with; the worst by default.")
    ] = None,
    interval: Annotated[
        float, typer.Option(envvar="KVATLAS_TOP_INTERVAL", help="Seconds between two looks at the agent.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", envvar="KVATLAS_TOP_ONCE", help="Print once and end.")] = False,
    ascii: Annotated[
        bool, typer.Option("--ascii", envvar="KVATLAS_TOP_ASCII", help="Draw with ASCII characters alone.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", envvar="KVATLAS_JSON", help="Print one JSON object.")] = False,
) -> int:
    """Show the pools of an agent in the terminal, the worst first: blocks, holders, and alerts that fire.

    Keys: q quits, j and k or the arrows choose a pool, p pauses. Without a terminal to draw on it prints once and ends.
    """
    if not LEAST_SECONDS <= interval <= MOST_SECONDS:
        raise SettingsError(f"--interval {interval:g}: give {LEAST_SECONDS:g} to {MOST_SECONDS:g} seconds")
    address = agent_address(agent)
    glyphs = ASCII if ascii else glyphs_for(sys.stdout.encoding, locale.getencoding())
    console = Console(highlight=False, markup=False, emoji=False)
    live = not (once or as_json) and _can_redraw(console)
    with AgentClient(address, timeout_seconds=LIVE_TIMEOUT_SECONDS if live else TIMEOUT_SECONDS) as client:
        if as_json:
            print(json.dumps(_once(client, address, pool, JSON_COLUMNS).to_json(), allow_nan=False))
            return 0
        if not live:
            _print_once(client, address, pool, console, glyphs)
            return 0
        return watch(
            lambda chosen, columns: take(client, chosen, columns),
            lambda error: without_password(str(error), address),
            console=console,
            address=without_password(address, address),
            pool=pool,
            glyphs=glyphs,
            interval_seconds=interval,
        )


def glyphs_for(stream_encoding: str | None, locale_encoding: str) -> Glyphs:
    """What can be shown: characters beyond ASCII only where both the output and the locale are UTF-8.

    Python writes UTF-8 in the C locale too, whatever the terminal takes.
    """
    with suppress(LookupError):  # an encoding that Python does not know
        if all(codecs.lookup(one or "ascii").name == "utf-8" for one in (stream_encoding, locale_encoding)):
            return UNICODE
    return ASCII


def without_password(text: str, address: str) -> str:
    """`text` without the user and password of an address that stands in it."""
    credentials, at, _ = urlsplit(address).netloc.rpartition("@")
    return text.replace(credentials + at, "") if at else text


def _can_redraw(console: Console) -> bool:
    return sys.stdout.isatty() and bool(os.environ.get("TERM")) and not console.is_dumb_terminal


def _print_once(client: AgentClient, address: str, pool: str | None, console: Console, glyphs: Glyphs) -> None:
    width = console.width
    look = _once(client, address, pool, BAR_ROWS * bar_columns(width))
    for line in lay_out(Frame(look, without_password(address, address)), glyphs, width, None):
        console.print(line, no_wrap=True, overflow="crop", crop=True)


def _once(client: AgentClient, address: str, pool: str | None, columns: int) -> Look:
    try:
        look = take(client, pool, columns)
    except AgentUnavailable as error:
        raise AgentUnavailable(
            without_password(f"{error}; is it running? kvatlas agent starts one, --agent names another", address)
        ) from error
    except AgentRefused as error:
        raise KvatlasError(without_password(str(error), address)) from error
    if pool is not None and look.chosen not in look.ids:
        names = ", ".join(look.ids[:8]) or "none"
        raise NoSuchPool(f"the agent lists no pool or engine {pool!r}; there are {names}")
    return look
