"""The page at /docs: every path of the API from its OpenAPI schema, with nothing fetched from anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "code{font-size:14px}section{border-top:1px solid #8886;padding:.4rem 0}h2{font-size:1rem;margin:.4rem 0}"
    "table{border-collapse:collapse}td{padding:.1rem 1rem .1rem 0;vertical-align:top}"
)


def render_docs(schema: Mapping[str, Any]) -> str:
    """An HTML page that lists paths, methods and parameters of an OpenAPI schema."""
    info = schema["info"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    sections = "".join(_sections(schema["paths"]))
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>"
        f"</head><body><h1>{title}</h1><p>Schema: <a href='openapi.json'>openapi.json</a></p>{sections}</body></html>"
    )


def _sections(paths: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            rows = "".join(_rows(operation.get("parameters", [])))
            table = f"<table>{rows}</table>" if rows else ""
            text = escape(operation.get("description", ""))
            yield f"<section><h2><code>{method.upper()} {escape(path)}</code></h2><p>{text}</p>{table}</section>"


def _rows(parameters: list[Mapping[str, Any]]) -> Iterator[str]:
    for parameter in parameters:
        shape = parameter.get("schema", {})
        kinds = [shape.get("type", "")] + [option.get("type", "") for option in shape.get("anyOf", [])]
        limits = [f"{word} {shape[key]}" for key, word in _LIMITS.items() if key in shape]
        facts = ", ".join([kind for kind in kinds if kind and kind != "null"] + limits)
        text = escape(parameter.get("description", ""))
        yield f"<tr><td><code>{escape(parameter['name'])}</code></td><td>{escape(facts)}</td><td>{text}</td></tr>"


_LIMITS = {"minimum": "from", "maximum": "to", "default": "default"}
