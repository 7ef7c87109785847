"""`kvatlas agent`: an option for each setting, made from the settings themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from agent.config import AgentSettings, has_flag, load_settings, variable

CONFIG = Annotated[Path | None, typer.Option(envvar="KVATLAS_CONFIG", help="Settings file, YAML or TOML.")]


def agent_command() -> Callable[..., None]:
    """The command, with a signature that has every setting with a flag; what is not given is not passed on."""

    def agent(config: Path | None = None, **given: Any) -> None:
        """Run the sidecar: sample every map of this host and serve the API and /metrics."""
        from agent.app import run_agent

        # A repeatable option that is not given is None with some versions of Typer, an empty list with others.
        run_agent(load_settings({name: value for name, value in given.items() if value not in (None, [])}, file=config))

    parameters = [_parameter("config", CONFIG)]
    # Those of the agent as a whole first, then those of its parts.
    fields = sorted(AgentSettings.model_fields.items(), key=lambda item: item[0] not in AgentSettings.__annotations__)
    for name, field in fields:
        if has_flag(name):
            parameters.append(_parameter(name, Annotated[_kind(field) | None, _option(name, field)]))
    agent.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    agent.__annotations__ = {one.name: one.annotation for one in parameters}
    return agent


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _kind(field: FieldInfo) -> Any:
    """What the command line makes of a setting; the settings themselves check what it means."""
    if get_origin(field.annotation) is tuple:
        return list[str]
    kinds = [one for one in (get_args(field.annotation) or (field.annotation,)) if one is not type(None)]
    if get_origin(field.annotation) is Literal or kinds[0] is SecretStr:
        return str
    return kinds[0]


def _option(name: str, field: FieldInfo) -> Any:
    description = field.description or ""
    text = f"{description[:1].upper()}{description[1:]} ({variable(name)})."
    if field.default in (None, "", ()):
        return typer.Option(help=text)
    shown = ("on" if field.default else "off") if isinstance(field.default, bool) else str(field.default)
    return typer.Option(help=text, show_default=shown)
