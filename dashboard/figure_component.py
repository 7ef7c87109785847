"""A Plotly figure whose place in the page outlives refreshes.

`st.plotly_chart` derives its identity from the figure's contents, so each refresh builds a new node: zoom is lost and
the chart flickers. This component is identified by its key alone and redraws in place.
"""

from __future__ import annotations

import gzip
import json
from importlib import resources
from pathlib import Path

import numpy as np

# Plotly uses it where it finds it loaded, and fails where another page is half-way through loading it for a table.
import pandas  # noqa: F401
import plotly
import plotly.graph_objects as go
import streamlit as st
from streamlit.components.v1 import declare_component

PLOTLY_FOLDER = Path(plotly.__file__).parent / "package_data"
CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "scrollZoom": False,  # the wheel scrolls the page
    "showTips": False,  # its notice on double-clicks would cover a tile
    "modeBarButtons": [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
    "doubleClick": "reset",
    "toImageButtonOptions": {"format": "png", "filename": "kvatlas", "scale": 2},
}
_HTML = """<div class="kvatlas-figure" role="img"><div class="kvatlas-plot"></div>
<div class="kvatlas-notice">No update from the dashboard's server: this picture is old.</div></div>"""


def pack(figure: go.Figure, *, plotly_url: str, label: str = "", expires_ms: int | None = None) -> bytes:
    """What figure.js unpacks: gzipped JSON, arrays as base64 of their own type. NaN would be an error, not bad JSON."""
    body = figure.to_dict()
    body |= {"plotly_url": plotly_url, "config": CONFIG, "label": label, "expires_ms": expires_ms}
    text = json.dumps(body, allow_nan=False, separators=(",", ":"), default=np.ndarray.tolist)
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


def _asset(name: str) -> str:
    return resources.files("dashboard").joinpath(name).read_text(encoding="utf-8")


# Plotly's script comes from its own package through this server: nothing is fetched from outside.
_script = declare_component("plotly", path=str(PLOTLY_FOLDER))
PLOTLY_URL = f"component/{_script.name}/plotly.min.js"  # relative to the page, so that a base path stays in front
_mount = st.components.v2.component(
    "kvatlas.figure",
    html=_HTML,
    css=_asset("figure.css"),
    js=_asset("figure.js"),
    isolate_styles=False,  # Plotly puts its own styles in the document's head
)


def show_figure(figure: go.Figure, *, key: str, label: str, height: int, expires_ms: int | None) -> None:
    """Draws `figure` at `height` pixels; screen readers say `label`.

    After `expires_ms` without another it is marked as old; None: never.
    """
    figure.update_layout(height=height, autosize=True)
    _mount(key=key, data=pack(figure, plotly_url=PLOTLY_URL, label=label, expires_ms=expires_ms), height=height)
