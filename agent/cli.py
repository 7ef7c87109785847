"""The `kvatlas` command: a list of small commands, and the one place that turns errors into exit statuses."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from agent.commands.alerts import alerts_app
from engine_shim.errors import KvatlasError, SettingsError
from engine_shim.launcher import give_up_output

EXIT_FAILED = 1
EXIT_USAGE = 2
DASHBOARD_ADDRESS = "127.0.0.1:8501"
AGENT_URLS = ["http://127.0.0.1:9477"]

app = typer.Typer(
    name="kvatlas",
    help="Watches the paged KV cache of an LLM inference engine, block by block.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(alerts_app)

Json = Annotated[bool, typer.Option("--json", envvar="KVATLAS_JSON", help="Print one JSON object.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit status: 0 fine, 1 failed, 2 wrong usage or settings."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    complete_app(*([] if given[0] == "--help" else given[:1]))
    try:
        status = app(given, prog_name="kvatlas", standalone_mode=False)
        sys.stdout.flush()  # here, where a disk that is full can still be told
    except SettingsError as error:
        return _complain(str(error), EXIT_USAGE)
    except KvatlasError as error:
        return _complain(str(error), EXIT_FAILED)
    except typer.Abort:
        return _complain("stopped", EXIT_FAILED)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        give_up_output()  # its reader left: nothing is wrong, and nothing more can be said
        return 0
    except SystemExit as leaving:
        if not isinstance(leaving.__context__, BrokenPipeError):
            raise
        give_up_output()  # the same, where typer met it first and made it a failure
        return 0
    except OSError as error:
        give_up_output()
        return _complain(str(error), EXIT_FAILED)
    except Exception as error:  # Click's usage errors have no public base here; all others are raised again
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        context = getattr(error, "ctx", None)
        command = getattr(context, "command_path", "") or "kvatlas"
        return _complain(f"{describe()} ({command} --help lists what there is)", EXIT_USAGE)
    return status if isinstance(status, int) else 0


def complete_app(*names: str) -> typer.Typer:
    """The application with the commands of these names that stand beside their code, which no other command should
    pay for; with all of them where none is named."""
    if not names or "agent" in names:
        from agent.commands.serve import agent_command

        _add("agent", agent_command)
    if not names or "demo" in names:
        from agent.demo.run import demo

        _add("demo", lambda: demo)
    if not names or "demo-vllm" in names:
        from agent.demo.vllm import demo_vllm

        _add("demo-vllm", lambda: demo_vllm)
    if not names or "plan" in names:
        from agent.commands.plan import plan

        _add("plan", lambda: plan)
    if not names or "top" in names:
        from agent.commands.top import top

        _add("top", lambda: top)
    if not names or "bundle" in names:
        from agent.commands.bundle import bundle

        _add("bundle", lambda: bundle)
    if not names or "simulate" in names:
        from agent.commands.simulate import simulate

        _add("simulate", lambda: simulate)
    if not names or "record" in names:
        from agent.commands.record import record_command

        _add("record", lambda: record_command)
    if not names or "replay" in names:
        from agent.commands.replay import replay

        _add("replay", lambda: replay)
    return app


# In the list of commands, which cuts longer ones off.
_SHORT = {
    "agent": "Run the sidecar: the API and /metrics.",
    "demo": "Watch two real KV pools serve a recorded trace.",
    "demo-vllm": "Watch vLLM itself, with a real model, serve one.",
    "top": "Watch pools, blocks and alerts in the terminal.",
    "bundle": "Pack what a bug report needs, without secrets.",
    "record": "Record what one pool does, for replay or simulate.",
    "replay": "Serve a recording as if its engine ran.",
}


def _add(name: str, make: Callable[[], Callable[..., Any]]) -> None:
    if not any(command.name == name for command in app.registered_commands):
        app.command(name=name, short_help=_SHORT.get(name))(make())


@app.command(name="map")
def map_(
    file: Annotated[str, typer.Argument(help="An allocation map (*.kvmap), or an engine of this host by its id.")],
    as_json: Json = False,
) -> None:
    """Read one allocation map and say what it holds."""
    from agent.commands.map_file import describe_map, map_named, render_map

    facts = describe_map(map_named(file))
    _print(facts) if as_json else print(render_map(facts))


@app.command(short_help="Read a snapshot of torch's allocator: what it holds.")
def allocator(
    snapshot: Annotated[str, typer.Argument(help="A snapshot file, pickle or JSON; or an engine to ask for one.")],
    html: Annotated[
        Path | None, typer.Option(envvar="KVATLAS_ALLOCATOR_HTML", help="Draw its segments into this HTML file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a snapshot of torch's allocator holds, how it is cut up, and what would give memory back."""
    from agent.commands.allocator import describe_allocator, render_allocator

    facts = describe_allocator(snapshot, html=html)
    _print(facts) if as_json else print(render_allocator(facts))


@app.command(short_help="Move live blocks, or switch that off and on.")
def compact(
    engine: Annotated[str, typer.Argument(help="An engine id, an id as in /v1/engines, or a map file.")],
    target: Annotated[
        float, typer.Option(envvar="KVATLAS_COMPACT_TARGET", help="Fragmentation rate to come down to.")
    ] = 0.10,
    max_moves: Annotated[
        int | None, typer.Option(envvar="KVATLAS_COMPACT_MAX_MOVES", help="Blocks to move at most.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", envvar="KVATLAS_COMPACT_DRY_RUN", help="Say what a run would move.")
    ] = False,
    off: Annotated[
        bool, typer.Option("--off", envvar="KVATLAS_COMPACT_OFF", help="Forbid moves; ends a run in progress.")
    ] = False,
    on: Annotated[bool, typer.Option("--on", envvar="KVATLAS_COMPACT_ON", help="Allow moves again.")] = False,
    relocation: Annotated[
        bool | None, typer.Option(envvar="KVATLAS_COMPACT_RELOCATION", help="Switch relocating allocation on or off.")
    ] = None,
    unplug: Annotated[
        bool, typer.Option("--unplug", envvar="KVATLAS_COMPACT_UNPLUG", help="Take KVAtlas out of a vLLM that runs.")
    ] = False,
    audit_log: Annotated[
        Path | None, typer.Option(envvar="KVATLAS_AUDIT_LOG", help="File to note this in; better the agent's own.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Move live blocks of one engine until its fragmentation is down, or switch that, or relocation, off and on."""
    from agent.commands.compact import Order, Wish, carry_out, render_result

    if dry_run + off + on + unplug + (relocation is not None) > 1:
        raise SettingsError("give one of --dry-run, --off, --on, --relocation, --no-relocation and --unplug")
    what: Wish = "plan" if dry_run else "off" if off else "on" if on else "unplug" if unplug else "run"
    if relocation is not None:
        what = "relocation_on" if relocation else "relocation_off"
    result = carry_out(engine, Order(what, target, max_moves), audit_log)
    _print(result.facts) if as_json else print(render_result(result))
    if result.warning:
        print(f"warning: {result.warning}", file=sys.stderr)
    return 0 if result.fine else EXIT_FAILED


@app.command(short_help="Say what to change in an engine that runs.")
def advise(
    engine: Annotated[str, typer.Argument(help="An engine id, an id as in /v1/engines, or a map file.")],
    config: Annotated[
        Path | None,
        typer.Option(envvar="KVATLAS_ADVISE_CONFIG", help="The config.json of its model, to be advised on more."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what to change in an engine that runs where memory is short, and what would bring nothing."""
    from agent.capacity.live import render
    from agent.commands.advise import advise_engine

    facts = advise_engine(engine, config)
    _print(facts) if as_json else print(render(facts))


@app.command(short_help="Check folders, maps, packages, port and GPU.")
def doctor(
    config: Annotated[Path | None, typer.Option(envvar="KVATLAS_CONFIG", help="Settings file of the agent.")] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT to check (KVATLAS_LISTEN).")] = None,
    as_json: Json = False,
) -> int:
    """Check folders, maps, packages, port and GPU; exits with 1 where something is broken."""
    from agent.config import load_settings
    from agent.doctor import examine, to_json

    settings = load_settings({"listen": listen} if listen else {}, file=config)
    findings = examine(settings.map_folders(), settings)
    if as_json:
        _print(to_json(findings))
    else:
        for one in findings:
            print(f"{one.level:<8}{one.check}: {one.message}" + (f"\n        -> {one.action}" if one.action else ""))
    return EXIT_FAILED if any(one.level == "failed" for one in findings) else 0


@app.command()
def version(as_json: Json = False) -> int:
    """Say which version this is, and of the allocation map."""
    from engine_shim.launcher import print_version

    return print_version(as_json=as_json)


@app.command()
def dashboard(
    listen: Annotated[
        str, typer.Option(envvar="KVATLAS_DASHBOARD_LISTEN", help="HOST:PORT to serve the page on.")
    ] = DASHBOARD_ADDRESS,
    agent: Annotated[
        list[str],
        typer.Option(envvar="KVATLAS_AGENT_URL", help="Address of an agent; again, or with commas, for more."),
    ] = AGENT_URLS,
    prometheus: Annotated[
        str, typer.Option(envvar="KVATLAS_PROMETHEUS_URL", help="A Prometheus that scrapes agents, for the fleet.")
    ] = "",
    base_path: Annotated[
        str, typer.Option(envvar="KVATLAS_DASHBOARD_BASE_PATH", help="Path in front of the page behind a proxy.")
    ] = "",
) -> None:
    """Serve the page that shows the pools of one agent, or of a fleet."""
    if find_spec("dashboard") is None or find_spec("streamlit") is None:
        raise SettingsError("the dashboard is not in this environment; pip install 'kvatlas[dashboard]'")
    agents = ",".join(agent)
    # By name: the agent may not import the dashboard. -P keeps the current folder off the module path.
    command = [sys.executable, "-P", "-m", "dashboard", "--listen", listen, "--agent", agents, "--base-path", base_path]
    command += ["--prometheus", prometheus]
    sys.stdout.flush()
    os.execv(sys.executable, command)  # noqa: S606 - no shell; this process becomes the server


def _print(value: dict[str, Any]) -> None:
    print(json.dumps(value, allow_nan=False))


def _complain(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status
