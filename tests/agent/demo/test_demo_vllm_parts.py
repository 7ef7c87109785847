"""The parts of the demo of vLLM that need no vLLM: requests made small, the plugin's folder, and the load."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import tomllib
from itertools import islice
from pathlib import Path

import pytest

from agent.demo.load import Load
from agent.demo.plugin_folder import ENTRY_POINT, GROUP, make_plugin_folder
from agent.demo.shaping import (
    FIRST_TOKEN,
    MOST_ANSWER_TOKENS,
    MOST_PROMPT_TOKENS,
    PROMPT_SCALE,
    TOKENS,
    ShapedRequest,
    shape,
    shaped,
)
from agent.demo.vllm import demo_vllm
from engine_shim.errors import SettingsError
from engine_shim.workload import TRACE_PREFIX_TOKENS, TraceRequest, Workload, load_workload

BLOCK = TRACE_PREFIX_TOKENS // PROMPT_SCALE


def test_prompts_share_what_the_trace_says_and_no_more() -> None:
    first = shape(TraceRequest(0, 0.0, 1536, 80, (1, 2, 3)))
    second = shape(TraceRequest(1, 0.5, 1536, 80, (1, 2, 9)))
    assert len(first.prompt) == 3 * BLOCK
    assert first.prompt[: 2 * BLOCK] == second.prompt[: 2 * BLOCK]
    assert first.prompt[2 * BLOCK] != second.prompt[2 * BLOCK]
    assert len(set(first.prompt)) > 2 * BLOCK  # not one token over and over
    private = [shape(TraceRequest(index, 0.0, 512, 1)).prompt for index in (2, 3)]
    assert private[0][0] != private[1][0]


def test_requests_of_the_trace_fit_the_model() -> None:
    for request in map(shape, load_workload("mooncake-conversation").requests[::20]):
        assert 1 <= len(request.prompt) <= MOST_PROMPT_TOKENS
        assert 1 <= request.answer_tokens <= MOST_ANSWER_TOKENS
        assert all(FIRST_TOKEN <= token < FIRST_TOKEN + TOKENS for token in request.prompt)


def test_the_trace_begins_again_where_it_ends() -> None:
    requests = (TraceRequest(0, 10.0, 16, 8), TraceRequest(1, 14.0, 16, 8))
    assert [one.arrival_s for one in islice(shaped(Workload("w", requests, 0)), 5)] == [0.0, 4.0, 5.0, 9.0, 10.0]


def test_the_entry_point_is_the_one_that_is_packaged(repository_root: Path, tmp_path: Path) -> None:
    name, _, value = ENTRY_POINT.partition(" = ")
    for file in ("pyproject.toml", "deploy/shim/pyproject.toml"):
        project = tomllib.loads((repository_root / file).read_text())["project"]
        assert project["entry-points"][GROUP] == {name: value}, file
    folder = make_plugin_folder(tmp_path / "plugin")
    program = (
        "import sys; from importlib.metadata import entry_points;"
        f"(point,) = [one for one in entry_points(group={GROUP!r}) if 'plugin' in str(one.dist._path)];"
        "point.load(); import engine_shim; print(engine_shim.__file__, 'agent' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(folder)}
    found = subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert found.stdout.split() == [str(folder / "engine_shim" / "__init__.py"), "False"]


def test_a_server_that_is_not_there_fails_requests_and_not_the_load() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{probe.getsockname()[1]}"
    load = Load(nowhere, "m", iter([ShapedRequest(0.0, (1, 2), 1), ShapedRequest(0.0, (3,), 1)]), speed=1.0)
    load.start()
    deadline = time.monotonic() + 120
    while load.figures.failed < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    load.stop()
    figures = load.figures
    assert (figures.sent, figures.done, figures.failed) == (2, 0, 2)
    assert "ConnectError" in figures.failure
    assert figures.tokens_per_second is None


def test_a_load_that_never_began_can_be_stopped() -> None:
    load = Load("http://127.0.0.1:9", "m", iter([]), speed=1.0)
    load.stop()
    assert load.figures.sent == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"allocation": "best"}, "give stock, relocating or auto"),
        ({"blocks": 10}, "blocks=10 cannot hold two of the largest requests; give 112 or more"),
        ({"speed": 0.0}, "speed=0.0 must be above 0"),
        ({"seconds": -1.0}, "seconds=-1.0 must be above 0"),
        ({}, "--python is not given; make demo-vllm finds both"),
        ({"python": Path("/nowhere")}, "python=/nowhere does not exist"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        demo_vllm(no_dashboard=True, **settings)  # type: ignore[arg-type]
