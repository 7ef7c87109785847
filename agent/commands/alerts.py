"""`kvatlas alerts …`: check rules, try receivers, and see and mute what an agent alerts on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

alerts_app = typer.Typer(
    name="alerts",
    help="Check rules, try receivers, and see and mute what an agent alerts on.",
    short_help="Check rules, try receivers, see and mute alerts.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Agent = Annotated[str, typer.Option("--agent", envvar="KVATLAS_AGENT_URL", help="Address of the agent.")]
Token = Annotated[str | None, typer.Option(envvar="KVATLAS_TOKEN", help="Seen by other users; better the variable.")]
TokenFile = Annotated[Path | None, typer.Option(envvar="KVATLAS_TOKEN_FILE", help="File that holds the token.")]
Json = Annotated[bool, typer.Option("--json", envvar="KVATLAS_JSON", help="Print one JSON object.")]
AGENT_URL = "http://127.0.0.1:9477"


@alerts_app.command(short_help="Read a rules file as the agent would; name each fault.")
def check(file: Annotated[Path, typer.Argument(help="A rules file, YAML.")], as_json: Json = False) -> None:
    """Read a rules file as the agent would; names every fault with its line and what to write instead."""
    from agent.commands import alert_work as work

    facts = work.check(file)
    _print(facts) if as_json else print(work.render_check(facts))


@alerts_app.command(name="test", short_help="Send one test message to a receiver.")
def try_(
    sink: Annotated[str, typer.Argument(help="slack, alertmanager, webhook or log.")],
    config: Annotated[Path | None, typer.Option(envvar="KVATLAS_CONFIG", help="Settings file of the agent.")] = None,
    as_json: Json = False,
) -> None:
    """Send one test message to a receiver, as it is set up for the agent here."""
    from agent.commands import alert_work as work
    from agent.config import load_settings

    facts = work.send_test(sink, load_settings({}, file=config))
    _print(facts) if as_json else print(f"{sink} took the message in {facts['seconds']:.2f} s")


@alerts_app.command(name="list", short_help="Show what is open, lately over and muted.")
def list_(agent: Agent = AGENT_URL, token: Token = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """Show the open alerts of an agent, the last ones that are over, and what is muted."""
    from agent.commands import alert_work as work

    with work.connect(agent, token, token_file) as client:
        found = client.alerts()
    print(found.model_dump_json() if as_json else work.render_alerts(found))


@alerts_app.command(short_help="Say nothing of a rule or an engine for a time.")
def mute(
    rule: Annotated[str | None, typer.Option(help="Mute this rule.")] = None,
    engine: Annotated[str | None, typer.Option(help="Mute this engine; with --rule, that rule there.")] = None,
    lasting: Annotated[str, typer.Option("--for", help="How long: 30m, 2h or 1d.")] = "1h",
    author: Annotated[str | None, typer.Option(help="Who asks for it; without it, this user.")] = None,
    comment: Annotated[str, typer.Option(help="Why.")] = "",
    agent: Agent = AGENT_URL,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Say nothing of a rule or an engine for a time; what fires still when that is over is told then."""
    from agent.commands import alert_work as work

    order = work.order_mute(rule, engine, lasting, author, comment)
    with work.connect(agent, token, token_file) as client:
        made = client.mute(order)
    print(made.model_dump_json() if as_json else work.render_mutes([made]))


@alerts_app.command()
def mutes(agent: Agent = AGENT_URL, token: Token = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """Show what is muted."""
    from agent.commands import alert_work as work

    with work.connect(agent, token, token_file) as client:
        found = client.mutes()
    print(found.model_dump_json() if as_json else work.render_mutes(found.mutes))


@alerts_app.command()
def unmute(
    id: Annotated[str, typer.Argument(help="Of the mute, as `kvatlas alerts mutes` shows it.")],
    agent: Agent = AGENT_URL,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """End a mute now."""
    from agent.commands import alert_work as work

    with work.connect(agent, token, token_file) as client:
        left = client.unmute(id)
    print(left.model_dump_json() if as_json else work.render_mutes(left.mutes))


def _print(value: dict[str, Any]) -> None:
    print(json.dumps(value, allow_nan=False))
