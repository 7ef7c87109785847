"""Writes the files that follow from others: docs/metrics.md, Grafana's dashboards, Prometheus Operator's rules.

    python scripts/write_generated.py [--check]

With --check nothing is written, and the exit status is 1 where a file is not what would be written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agent.catalogue import catalogue  # noqa: E402 - needs the path above
from agent.exporter import LABELS  # noqa: E402

RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
OPERATOR_RULES = ROOT / "deploy" / "kubernetes" / "components" / "monitoring" / "prometheus-rule.yaml"
GRAFANA = ROOT / "deploy" / "grafana"

Panel = dict[str, Any]
# Of states, as the page has them; none is red or green, which are kept for what is wrong and what is well.
STATE_COLOURS = {
    "used": "#2a6fdb",
    "cached": "#8ab8ff",
    "free": "#c7c7c7",
    "pinned": "#8f3bb8",
    "reserved": "#4d4d4d",
    "unknown": "#e0b400",
}
WIDTH = 24
FLEET = 'job=~"$job", namespace=~"$namespace", model=~"$model"'
POOL = 'engine_id=~"$engine", pool=~"$pool", rank=~"$rank"'


def timeseries(
    title: str, unit: str, *queries: tuple[str, str], about: str = "", stacked: bool = False, top: float | None = None
) -> Panel:
    """`queries` are pairs of PromQL and legend."""
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 60 if stacked else 8, "showPoints": "never"}
    if stacked:
        custom["stacking"] = {"mode": "normal"}
    panel = _panel("timeseries", title, unit, queries, about)
    panel["fieldConfig"]["defaults"] |= {"custom": custom, "min": 0} | ({} if top is None else {"max": top})
    panel["fieldConfig"]["overrides"] = _state_colours() if stacked else []
    panel["options"] = {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel


def stat(title: str, unit: str, query: str, *steps: tuple[float, str], about: str = "") -> Panel:
    """`steps` are values from which on the number has a colour."""
    panel = _panel("stat", title, unit, ((query, title),), about)
    thresholds = [{"color": "text", "value": None}, *({"color": colour, "value": value} for value, colour in steps)]
    panel["fieldConfig"]["defaults"] |= {
        "thresholds": {"mode": "absolute", "steps": thresholds},
        "noValue": "nothing",
    }
    panel["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    return panel


def table(title: str, unit: str, query: str, about: str = "") -> Panel:
    """One row a series, with its labels as columns; an engine leads to its own page."""
    panel = _panel("table", title, unit, ((query, ""),), about)
    panel["targets"][0] |= {"format": "table", "instant": True}
    hidden = {"Time": True, "__name__": True, "job": True, "instance": True, "endpoint": True, "container": True}
    panel["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden}}]
    link = {"title": "Its pools", "url": "/d/kvatlas-pool?var-engine=${__data.fields.engine_id}&${__url_time_range}"}
    panel["fieldConfig"]["overrides"] = [
        {"matcher": {"id": "byName", "options": "engine_id"}, "properties": [{"id": "links", "value": [link]}]}
    ]
    return panel


def _panel(kind: str, title: str, unit: str, queries: Sequence[tuple[str, str]], about: str) -> Panel:
    targets = [
        {"refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
        for number, (query, legend) in enumerate(queries)
    ]
    return {
        "type": kind,
        "title": title,
        "description": about,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "options": {},
        "targets": targets,
    }


_SOURCE = {"type": "prometheus", "uid": "${source}"}


def _state_colours() -> list[dict[str, Any]]:
    return [
        {
            "matcher": {"id": "byName", "options": state},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
        }
        for state, colour in STATE_COLOURS.items()
    ]


def variable(name: str, query: str) -> dict[str, Any]:
    """A choice of label values; all of them at first."""
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": "values"},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard(
    uid: str, title: str, variables: list[dict[str, Any]], rows: Sequence[tuple[str, int, list[Panel]]]
) -> str:
    """`rows` are a title, a height, and panels that share the width evenly."""
    panels: list[Panel] = []
    y = 0
    for name, height, row in rows:
        panels.append(
            {"type": "row", "title": name, "collapsed": False, "panels": [], "gridPos": _place(0, y, WIDTH, 1)}
        )
        y += 1
        width = WIDTH // len(row)
        for number, panel in enumerate(row):
            panels.append({**panel, "gridPos": _place(number * width, y, width, height)})
        y += height
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    content = {
        "uid": uid,
        "title": title,
        "tags": ["kvatlas"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, *variables]},
        "panels": panels,
        "links": [{"type": "dashboards", "title": "KVAtlas", "tags": ["kvatlas"], "asDropdown": False}],
    }
    return json.dumps(content, indent=1) + "\n"


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def fleet() -> str:
    """Every engine at a glance; but for three tables it reads what rules.yml has summed up before."""
    return dashboard(
        "kvatlas-fleet",
        "KVAtlas: fleet",
        [
            variable("job", "label_values(kvatlas:model_engines:count, job)"),
            variable("namespace", "label_values(kvatlas:model_engines:count, namespace)"),
            variable("model", "label_values(kvatlas:model_engines:count, model)"),
        ],
        [
            (
                "Now",
                4,
                [
                    stat("Pools up", "short", f"sum(kvatlas:model_engines:count{{{FLEET}}})"),
                    stat(
                        "Down", "short", f"sum(kvatlas:model_engines_down:count{{{FLEET}}}) or vector(0)", (1, "orange")
                    ),
                    stat(
                        "Stalled",
                        "short",
                        f"sum(kvatlas:model_engines_stalled:count{{{FLEET}}}) or vector(0)",
                        (1, "red"),
                    ),
                    stat("Fullest pool", "percentunit", f"max(kvatlas:model_pool_used:max{{{FLEET}}})", (0.95, "red")),
                    stat(
                        "First to run full",
                        "s",
                        f"min(kvatlas:model_exhaustion_seconds:min{{{FLEET}}})",
                        about="By the trend of the last two minutes; nothing where no pool runs full.",
                    ),
                    stat(
                        "Alerts that fire",
                        "short",
                        'sum(kvatlas_alerts{state="firing", job=~"$job"}) or vector(0)',
                        (1, "orange"),
                    ),
                ],
            ),
            (
                "KV memory",
                8,
                [
                    timeseries(
                        "KV memory by state",
                        "bytes",
                        (f"sum by (state) (kvatlas:model_bytes:sum{{{FLEET}}})", "{{state}}"),
                        stacked=True,
                        about="cached is a prefix that nobody uses now: it can be evicted at any time.",
                    ),
                    timeseries(
                        "Pools in use, by model",
                        "percentunit",
                        (f"kvatlas:model_used:ratio{{{FLEET}}}", "{{model}}"),
                        top=1,
                        about="Used and pinned blocks of those that can be given to requests.",
                    ),
                ],
            ),
            (
                "Requests",
                8,
                [
                    timeseries(
                        "Requests",
                        "short",
                        (f"sum(kvatlas:model_running_requests:sum{{{FLEET}}})", "running"),
                        (f"sum(kvatlas:model_waiting_requests:sum{{{FLEET}}})", "waiting"),
                    ),
                    timeseries("Preemptions", "cps", (f"kvatlas:model_preemptions:rate2m{{{FLEET}}}", "{{model}}")),
                    timeseries(
                        "Prefix hits",
                        "percentunit",
                        (f"kvatlas:model_prefix_hit:ratio2m{{{FLEET}}}", "{{model}}"),
                        top=1,
                        about="Prompt tokens that were found in the cache; no line where nobody asks.",
                    ),
                ],
            ),
            (
                "Fragmentation",
                8,
                [
                    timeseries(
                        "Fragmentation, median and worst pool",
                        "percentunit",
                        (f"kvatlas:model_fragmentation:median{{{FLEET}}}", "{{model}}, median"),
                        (f"kvatlas:model_fragmentation:max{{{FLEET}}}", "{{model}}, worst"),
                        top=1,
                        about="It costs whoever wants neighbouring blocks: KV transfer, offload, memory given back. "
                        "Without one of these a high rate is a fact and no fault.",
                    ),
                    table(
                        "Pools that are fullest",
                        "percentunit",
                        f"topk(20, kvatlas:pool_used:ratio{{{FLEET}}})",
                    ),
                ],
            ),
            (
                "Where to look",
                8,
                [
                    table(
                        "Pools that run full within the hour",
                        "s",
                        f"bottomk(20, kvatlas_pool_exhaustion_seconds{{{FLEET}}} < 3600)",
                    ),
                    table(
                        "Engines without numbers of now",
                        "short",
                        f"kvatlas_engine_up{{{FLEET}}} == 0",
                        about="The agent answers and the engine's map is stale or cannot be read; runbook: map-stale.",
                    ),
                ],
            ),
        ],
    )


def pool() -> str:
    """One engine's pools in every respect."""
    # An engine counts once, whatever pools and ranks it has.
    each = f"max by (job, instance, engine_id) (kvatlas_engine_stalled{{{POOL}}})"
    stalled_engines = f"count({each} == 1) or vector(0)"
    return dashboard(
        "kvatlas-pool",
        "KVAtlas: pool",
        [
            variable("engine", "label_values(kvatlas_engine_up, engine_id)"),
            variable("pool", 'label_values(kvatlas_engine_up{engine_id=~"$engine"}, pool)'),
            variable("rank", 'label_values(kvatlas_engine_up{engine_id=~"$engine"}, rank)'),
        ],
        [
            (
                "Now",
                4,
                [
                    stat(
                        "In use",
                        "percentunit",
                        f"max(kvatlas:pool_used:ratio{{{POOL}}})",
                        (0.9, "orange"),
                        (0.95, "red"),
                    ),
                    stat(
                        "Fragmentation",
                        "percentunit",
                        f'max(kvatlas_pool_fragmentation_ratio{{set="allocatable", {POOL}}})',
                    ),
                    stat("Runs full in", "s", f"min(kvatlas_pool_exhaustion_seconds{{{POOL}}})"),
                    stat("Requests that wait", "short", f"max(kvatlas_engine_waiting_requests{{{POOL}}})"),
                    stat("Engines stalled", "short", stalled_engines, (1, "red")),
                    stat("Age of the numbers", "s", f"max(kvatlas_snapshot_age_seconds{{{POOL}}})", (10, "orange")),
                ],
            ),
            (
                "Blocks",
                9,
                [
                    timeseries(
                        "Blocks by state",
                        "short",
                        (f"sum by (state) (kvatlas_pool_blocks{{{POOL}}})", "{{state}}"),
                        stacked=True,
                    ),
                    timeseries(
                        "Longest run of neighbouring blocks",
                        "short",
                        (f"kvatlas_pool_largest_run_blocks{{{POOL}}}", "{{engine_id}} {{pool}} {{rank}}, {{set}}"),
                        (
                            f"kvatlas:pool_allocatable:blocks{{{POOL}}}",
                            "{{engine_id}} {{pool}} {{rank}}, all allocatable",
                        ),
                        (f"kvatlas_pool_headroom_blocks{{{POOL}}}", "{{engine_id}} {{pool}} {{rank}}, headroom"),
                    ),
                ],
            ),
            (
                "Fragmentation",
                8,
                [
                    timeseries(
                        "Fragmentation",
                        "percentunit",
                        (f"kvatlas_pool_fragmentation_ratio{{{POOL}}}", "{{engine_id}} {{pool}} {{rank}}, {{set}}"),
                        top=1,
                    ),
                    timeseries(
                        "Blocks in runs too short for 2^order",
                        "percentunit",
                        (f"kvatlas_pool_unusable_ratio{{{POOL}}}", "{{engine_id}} {{pool}} {{rank}}, {{order}}"),
                        top=1,
                    ),
                    timeseries(
                        "Compaction",
                        "cps",
                        (
                            f"rate(kvatlas_compaction_moved_blocks_total{{{POOL}}}[5m])",
                            "{{engine_id}}, live blocks moved",
                        ),
                        (
                            f"rate(kvatlas_relocation_copies_total{{{POOL}}}[5m])",
                            "{{engine_id}}, cached blocks relocated",
                        ),
                    ),
                ],
            ),
            (
                "Requests",
                8,
                [
                    timeseries(
                        "Requests",
                        "short",
                        (f"kvatlas_engine_running_requests{{{POOL}}}", "{{engine_id}} {{rank}}, running"),
                        (f"kvatlas_engine_waiting_requests{{{POOL}}}", "{{engine_id}} {{rank}}, waiting"),
                    ),
                    timeseries(
                        "Blocks",
                        "cps",
                        (f"rate(kvatlas_blocks_allocated_total{{{POOL}}}[2m])", "{{engine_id}}, allocated"),
                        (f"rate(kvatlas_blocks_evicted_total{{{POOL}}}[2m])", "{{engine_id}}, evicted"),
                        (f"rate(kvatlas_blocks_reused_total{{{POOL}}}[2m])", "{{engine_id}}, reused"),
                    ),
                    timeseries(
                        "What goes wrong",
                        "cps",
                        (f"rate(kvatlas_preemptions_total{{{POOL}}}[2m])", "{{engine_id}}, preemptions"),
                        (
                            f"rate(kvatlas_allocation_failures_total{{{POOL}}}[2m])",
                            "{{engine_id}}, allocations refused",
                        ),
                    ),
                ],
            ),
            (
                "Prefix cache",
                8,
                [
                    timeseries(
                        "Prefix hits", "percentunit", (f"kvatlas:prefix_hit:ratio2m{{{POOL}}}", "{{engine_id}}"), top=1
                    ),
                    timeseries(
                        "Idle before eviction",
                        "s",
                        (
                            median_by_engine("kvatlas_block_idle_before_evict_seconds_bucket"),
                            "{{engine_id}}, median",
                        ),
                        (
                            median_by_engine("kvatlas_block_reuse_gap_seconds_bucket"),
                            "{{engine_id}}, median before a hit",
                        ),
                        about="Prefixes that are evicted sooner than they are asked for again are lost work.",
                    ),
                    timeseries(
                        "Empty slots of used blocks",
                        "bytes",
                        (f"kvatlas_pool_tail_waste_bytes{{{POOL}}}", "{{engine_id}}"),
                    ),
                ],
            ),
            (
                "What watching costs",
                7,
                [
                    timeseries(
                        "CPU of the shim in the engine",
                        "percentunit",
                        (f"rate(kvatlas_shim_cpu_seconds_total{{{POOL}}}[5m])", "{{engine_id}} {{pool}}"),
                        about="Of one core.",
                    ),
                    timeseries(
                        "Reads that found no whole map",
                        "cps",
                        (f"rate(kvatlas_snapshots_torn_total{{{POOL}}}[5m])", "{{engine_id}}"),
                    ),
                    timeseries(
                        "Age of the numbers", "s", (f"kvatlas_snapshot_age_seconds{{{POOL}}}", "{{engine_id}} {{rank}}")
                    ),
                ],
            ),
        ],
    )


def median_by_engine(buckets: str) -> str:
    """The median of a histogram over five minutes, for each engine."""
    return f"histogram_quantile(0.5, sum by (le, engine_id) (rate({buckets}{{{POOL}}}[5m])))"


def operator_rules() -> str:
    """The groups of rules.yml, word for word, as the resource that Prometheus Operator reads."""
    lines = RULES.read_text(encoding="utf-8").splitlines()
    start = lines.index("groups:")
    head = [
        "# Written by scripts/write_generated.py from deploy/prometheus/rules.yml: change that file.",
        "apiVersion: monitoring.coreos.com/v1",
        "kind: PrometheusRule",
        "metadata:",
        "  name: kvatlas",
        "spec:",
    ]
    return "\n".join([*head, *(f"  {line}" if line else "" for line in lines[start:])]) + "\n"


METRICS_HEAD = """# Metrics

What an agent exports at `/metrics`, in the text format of Prometheus. Written from the code by
`scripts/write_generated.py`; a test holds it to what a real agent exports.

Units are seconds, bytes, blocks, tokens and shares of 1 (`_ratio`). What is not known is absent, never 0: a sleeping
engine has no pool, an engine that is gone has no series, a rate of nothing is no rate. Label values are of closed sets
apart from names that an operator gives (engine, model, pool, source, sink, device); no label holds a request, a block
or a process. *pool* below stands for the labels POOL_LABELS; `rank` keeps the pools of one engine's ranks apart.

[compatibility.md](compatibility.md#metrics) says what may change between versions, and how; [alerts.md](alerts.md) what
to alert on, [kubernetes.md](kubernetes.md#grafana) which dashboards there are.
"""


def metrics() -> str:
    """The reference of all metrics."""
    pool_labels = ", ".join(f"`{label}`" for label in LABELS)
    lines = [METRICS_HEAD.replace("POOL_LABELS", pool_labels)]
    for part in catalogue():
        lines += [f"## {part.title}", "", "| metric | type | labels | meaning |", "|---|---|---|---|"]
        for family in part.families:
            of_pool = family.labels[: len(LABELS)] == LABELS
            more = family.labels[len(LABELS) :] if of_pool else family.labels
            labels = ", ".join((["*pool*"] if of_pool else []) + [f"`{label}`" for label in more])
            meaning = family.meaning.replace("|", "\\|").replace("**", "^").replace("<", "&lt;")
            lines.append(f"| `{family.name}` | {family.kind} | {labels} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def files() -> dict[Path, str]:
    """Every file with what it must hold."""
    return {
        OPERATOR_RULES: operator_rules(),
        ROOT / "docs" / "metrics.md": metrics(),
        GRAFANA / "fleet.json": fleet(),
        GRAFANA / "pool.json": pool(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the files that follow from others.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where a file is out of date")
    check = parser.parse_args().check
    stale = [path for path, text in files().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'out of date' if check else 'written'}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files()[path], encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
