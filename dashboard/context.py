"""What every view is given, and how it asks the agent."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import streamlit as st

from agent.client import AgentClient, AgentRefused, AgentUnavailable
from dashboard import conditions, widgets
from dashboard.palette import Theme
from dashboard.source import source
from dashboard.wording import visible

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Context:
    """The page's choices in one run of it. Another choice runs the whole page again, with another context."""

    theme: Theme
    paused: bool
    pool: str | None  # id of the chosen pool; None while no pool is known
    client: AgentClient  # of the agent that knows the pool; for this session alone
    agent: int = 1  # number of that agent, from 1: widgets are named by it, whose names the browser gets to see

    @property
    def pool_key(self) -> tuple[str, str]:
        """What tells pools apart in what a session keeps: two agents may have pools of one id. For the server alone."""
        return self.client.url, self.pool or ""

    def every(self, seconds: float) -> float | None:
        """`run_every` of a fragment: None, which is never, while the page is paused."""
        return None if self.paused else seconds

    def expires_ms(self, seconds: float) -> int | None:
        """For show_figure, in a fragment of that period: after how long its picture is old. Never, while paused."""
        return None if self.paused else round(8 * seconds * 1000)


def ask(call: Callable[[], Answer]) -> Answer | None:
    """The agent's answer. Where there is none, the page says why and the result is None.

    What to do about an agent that does not answer at all is said once, by the banner above every view.
    """
    try:
        return call()
    except AgentUnavailable as error:
        st.html(widgets.note_html(f"No data: {source().reason(error)}"))
    except AgentRefused as error:
        show_condition(conditions.refused(error))
    return None


def show_condition(condition: conditions.Condition) -> None:
    """One banner."""
    draw = {"error": st.error, "warning": st.warning, "info": st.info}[condition.severity]
    draw(f"{plain(condition.what)}  \n{plain(condition.action)}")


def plain(text: str) -> str:
    """Text as it is: what comes from outside must not be read as Markdown."""
    return "".join(f"\\{one}" if one in string.punctuation else one for one in visible(text).strip())
