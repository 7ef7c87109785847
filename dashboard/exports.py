"""What a view shows as files: rows as CSV and as JSON. Files are made when they are asked for, not at each refresh."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import streamlit as st

from dashboard.source import chosen_agent

Row = Mapping[str, Any]
Rows = Sequence[Row]


def csv_text(rows: Rows) -> str:
    """One line a row, the columns of all rows in the order they first appear. Nested values are JSON.

    What a spreadsheet would take for a formula is set off by an apostrophe, since ids come from outside.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in columns])
    return text.getvalue()


def json_text(name: str, rows: Rows, **about: Any) -> str:
    """One object: a schema, what the rows are about, and the rows."""
    whole = {"schema": f"kvatlas.dashboard-{name}/v1", **about, "rows": [dict(row) for row in rows]}
    return json.dumps(whole, allow_nan=False, indent=1, default=str) + "\n"


class _Shown:
    """What a view shows now, for every button that it has drawn: the browser may still have one of before a refresh."""

    def __init__(self) -> None:
        self.now: tuple[Callable[[], Rows], dict[str, Any]] = tuple, {}  # one value, since another thread reads it

    def csv(self) -> str:
        rows, _ = self.now
        return csv_text(rows())

    def json(self, name: str) -> str:
        rows, about = self.now
        return json_text(name, rows(), **about)


def offer(name: str, rows: Callable[[], Rows], **about: Any) -> None:
    """Two buttons that download the rows. `rows` is called when one of them is pressed."""
    pool = about.get("pool") or about.get("id") or ""
    shown: _Shown = st.session_state.setdefault(f"export_{name}_shown_{chosen_agent()}_{pool}", _Shown())
    shown.now = rows, about
    with st.container(horizontal=True, key=f"export_{name}", width="content"):
        st.download_button(
            "CSV",
            shown.csv,
            file_name=f"kvatlas-{name}.csv",
            mime="text/csv",
            key=f"export_csv_{name}",
            help="What is shown, as comma-separated values",
            on_click="ignore",
        )
        st.download_button(
            "JSON",
            lambda: shown.json(name),
            file_name=f"kvatlas-{name}.json",
            mime="application/json",
            key=f"export_json_{name}",
            help="What is shown, as JSON",
            on_click="ignore",
        )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, allow_nan=False, default=str)
    text = str(value)
    return f"'{text}" if isinstance(value, str) and text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
