"""`kvatlas demo-vllm`: vLLM's own server with a real language model on the CPU, on requests of a recorded trace."""

from __future__ import annotations

import json
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import typer

from agent.client import AgentClient
from agent.demo.figures import EngineFigures, require_positive
from agent.demo.load import Load, LoadFigures
from agent.demo.plugin_folder import make_plugin_folder
from agent.demo.screen import Screen
from agent.demo.shaping import MOST_ANSWER_TOKENS, MOST_PROMPT_TOKENS, shaped
from agent.demo.supervisor import Child, ChildFailed, Supervisor, free_address, joined, url
from agent.demo.watching import StopOnSignal, await_true, live_engines, watch
from agent.wire import EngineSummary
from engine_shim.errors import SettingsError
from engine_shim.workload import load_workload

SCHEMA = "kvatlas.demo-vllm/v1"
ENGINE_ID = "demo-vllm"
MODEL_NAME = "smollm2-135m"
BLOCK_TOKENS = 32  # attention on the CPU wants a multiple of it
MOST_SEQUENCES = 32
MOST_BATCHED_TOKENS = 256
START_SECONDS = 600.0  # vLLM's imports on a slow disk and its warm-up, on a machine that has other work
QUESTION = "The capital of France is"
DIRECTORY = "make demo-vllm finds both"

Allocation = Literal["stock", "relocating", "auto"]


def demo_vllm(
    python: Annotated[
        Path | None, typer.Option(envvar="KVATLAS_DEMO_VLLM_PYTHON", help=f"Python that has vLLM; {DIRECTORY}.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(envvar="KVATLAS_DEMO_VLLM_MODEL", help=f"Folder of the model; {DIRECTORY}.")
    ] = None,
    allocation: Annotated[
        str, typer.Option(envvar="KVATLAS_DEMO_VLLM_ALLOCATION", help="stock, relocating or auto.")
    ] = "auto",
    trace: Annotated[
        str, typer.Option(envvar="KVATLAS_DEMO_TRACE", help="A bundled trace by name, or a trace file.")
    ] = "mooncake-conversation",
    speed: Annotated[
        float, typer.Option(envvar="KVATLAS_DEMO_VLLM_SPEED", help="Trace seconds a second, as far as vLLM keeps up.")
    ] = 0.2,
    blocks: Annotated[
        int, typer.Option(envvar="KVATLAS_DEMO_VLLM_BLOCKS", help=f"Blocks of {BLOCK_TOKENS} tokens.")
    ] = 600,
    seconds: Annotated[
        float | None, typer.Option(envvar="KVATLAS_DEMO_SECONDS", help="End after so long; by default at Ctrl-C.")
    ] = None,
    listen: Annotated[
        str, typer.Option(envvar="KVATLAS_DEMO_LISTEN", help="HOST:PORT of the agent, or the next free port.")
    ] = "127.0.0.1:9477",
    dashboard_listen: Annotated[
        str, typer.Option(envvar="KVATLAS_DEMO_DASHBOARD_LISTEN", help="HOST:PORT of the page, or the next free port.")
    ] = "127.0.0.1:8501",
    engine_listen: Annotated[
        str, typer.Option(envvar="KVATLAS_DEMO_VLLM_LISTEN", help="HOST:PORT of vLLM, or the next free port.")
    ] = "127.0.0.1:8000",
    no_dashboard: Annotated[
        bool, typer.Option("--no-dashboard", envvar="KVATLAS_DEMO_NO_DASHBOARD", help="Start no dashboard.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="KVATLAS_JSON", help="Print the summary as one JSON object.")
    ] = False,
) -> None:
    """Serve a recorded trace from vLLM itself, with a real language model, watched live by agent and dashboard."""
    chosen = _checked(allocation, speed, blocks, seconds)
    if not no_dashboard and find_spec("streamlit") is None:
        raise SettingsError(
            "the dashboard is not in this environment; pip install 'kvatlas[dashboard]' or --no-dashboard"
        )
    vllm_python, folder = _given("python", python), _given("model", model)
    workload = load_workload(trace)
    engine_address, agent_address = free_address(engine_listen), free_address(listen)
    page_address = None if no_dashboard else free_address(dashboard_listen)
    stop, screen = StopOnSignal(), Screen(quiet=as_json)
    figures = EngineFigures(ENGINE_ID)
    with Supervisor() as supervisor:
        server = _start_vllm(supervisor, vllm_python, folder, engine_address, blocks, chosen)
        watching = ["engine_shim.launcher", "agent", "--listen", joined(agent_address)]
        watching += ["--engine-metrics", f"{ENGINE_ID}={url(engine_address)}/metrics", "--engine-metrics-seconds", "2"]
        # Only where the engine was told to wait for the agent's word is it given that.
        watching += ["--compaction", ENGINE_ID if chosen == "auto" else "off"]
        supervisor.start("agent", watching)
        if page_address is not None:
            page = ["dashboard", "--listen", joined(page_address), "--agent", url(agent_address)]
            supervisor.start("dashboard", page)
        load = Load(url(engine_address), MODEL_NAME, shaped(workload), speed)
        with AgentClient(url(agent_address)) as client, screen:
            screen.say(f"vLLM starts with {folder.name} and {blocks:,} blocks of {BLOCK_TOKENS} tokens on the CPU ...")
            await_true(lambda: _missing(client, url(engine_address), screen), supervisor, stop, START_SECONDS)
            if not stop.requested:
                page_url = None if page_address is None else url(page_address)
                screen.say(f"vLLM       {url(engine_address)}  (OpenAI API, metrics at /metrics)")
                screen.started(url(agent_address), page_url, supervisor.maps)
                screen.say(f"It says    {QUESTION}{_answer(url(engine_address))} ...")
                screen.say(f"Trace {trace}: requests arrive as recorded, {speed:g} trace seconds a second.")
                load.start()
            deadline = None if seconds is None else time.monotonic() + seconds
            try:
                watch(client, supervisor, stop, deadline, lambda found: screen.show(found, [figures]), [figures])
                last = next((one for one in live_engines(client) if one.engine_id == ENGINE_ID), None)
            finally:
                load.stop()
        supervisor.stop([server])
    row = _summary(figures, load.figures, last, chosen)
    if as_json:
        print(json.dumps({"schema": SCHEMA, "trace": trace, "speed": speed, "blocks": blocks, **row}))
    else:
        screen.summary([row])
    if load.figures.failed:
        raise ChildFailed(f"{load.figures.failed} requests failed: {load.figures.failure}")


def _checked(allocation: str, speed: float, blocks: int, seconds: float | None) -> Allocation:
    require_positive("speed", speed)
    require_positive("seconds", seconds)
    if blocks * BLOCK_TOKENS < 2 * (MOST_PROMPT_TOKENS + MOST_ANSWER_TOKENS):
        least = 2 * (MOST_PROMPT_TOKENS + MOST_ANSWER_TOKENS) // BLOCK_TOKENS
        raise SettingsError(f"blocks={blocks} cannot hold two of the largest requests; give {least} or more")
    if allocation not in ("stock", "relocating", "auto"):
        raise SettingsError(f"allocation={allocation!r} is none; give stock, relocating or auto")
    return allocation  # type: ignore[return-value]  # it is one of them


def _given(name: str, path: Path | None) -> Path:
    if path is None:
        raise SettingsError(f"--{name} is not given; {DIRECTORY}")
    if not path.exists():
        raise SettingsError(f"{name}={path} does not exist; {DIRECTORY}")
    return Path(os.path.abspath(path))  # not resolved: an environment's Python is a link, and known by its own place


def _start_vllm(
    supervisor: Supervisor, python: Path, model: Path, address: tuple[str, int], blocks: int, allocation: Allocation
) -> Child:
    """vLLM's OpenAI server as it comes, with the shim found through its entry point."""
    arguments = [
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        MODEL_NAME,
    ]
    arguments += ["--host", address[0], "--port", str(address[1]), "--enforce-eager"]
    arguments += ["--max-model-len", str(MOST_PROMPT_TOKENS + MOST_ANSWER_TOKENS), "--block-size", str(BLOCK_TOKENS)]
    arguments += ["--num-gpu-blocks-override", str(blocks), "--max-num-seqs", str(MOST_SEQUENCES)]
    # Short steps: a prompt computed at once would hold everybody up for seconds here, and be called a stall.
    arguments += ["--max-num-batched-tokens", str(MOST_BATCHED_TOKENS)]
    arguments += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    environment = {
        "PYTHONPATH": str(make_plugin_folder(supervisor.scratch / "plugin")),
        "KVATLAS_ENGINE_ID": ENGINE_ID,
        "KVATLAS_VLLM_ALLOCATION": allocation,
        "OMP_NUM_THREADS": "1",  # threads of several processes on few cores are in each other's way
        "VLLM_RPC_BASE_PATH": ".",  # its sockets: the path to one must be short, wherever the scratch folder lies
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return supervisor.start(ENGINE_ID, arguments, python=python, folder=supervisor.scratch, **environment)


def _missing(client: AgentClient, engine_url: str, screen: Screen) -> str:
    """What is not up yet; "" where vLLM answers and the agent sees its map."""
    try:
        healthy = httpx.get(f"{engine_url}/health", timeout=2.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        healthy = False
    seen = bool(healthy and any(one.engine_id == ENGINE_ID for one in live_engines(client)))
    screen.waiting(int(seen), 1)
    return "" if seen else "the agent sees no map of vLLM" if healthy else "vLLM does not answer"


def _answer(engine_url: str) -> str:
    """What the model makes of a question: it is a real one."""
    body = {"model": MODEL_NAME, "prompt": QUESTION, "max_tokens": 8, "temperature": 0}
    try:
        response = httpx.post(f"{engine_url}/v1/completions", json=body, timeout=60.0, trust_env=False)
        response.raise_for_status()
        return str(response.json()["choices"][0]["text"]).partition("\n")[0]
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise ChildFailed(f"vLLM did not answer a question: {type(error).__name__}") from error


def _summary(
    figures: EngineFigures, load: LoadFigures, last: EngineSummary | None, allocation: Allocation
) -> dict[str, Any]:
    counters = last.counters if last is not None else {}
    query = counters.get("prefix_query_tokens", 0)
    compared = last.metrics_comparison if last is not None else None
    rate = load.tokens_per_second
    return {
        "engine": ENGINE_ID,
        "allocation": allocation,
        "requests_done": load.done,
        "requests_failed": load.failed,
        "prompt_tokens": load.prompt_tokens,
        "cached_tokens": load.cached_tokens,
        "answer_tokens": load.answer_tokens,
        "tokens_per_second": None if rate is None else round(rate, 1),
        "prefix_hit_ratio": round(counters.get("prefix_hit_tokens", 0) / query, 4) if query else None,
        "preemptions": counters.get("preemptions"),
        "relocation_copies": counters.get("relocation_copies"),
        "repairs": counters.get("repairs"),
        **figures.shares(),
        "metrics_disagreement_ratio": None if compared is None else compared.disagreement_ratio,
    }
