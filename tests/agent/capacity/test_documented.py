"""docs/capacity.md shows what the planner really prints, and names the flags and figures that it really uses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from agent.capacity.config_reader import read_geometry
from agent.capacity.engine_flags import RECIPES
from agent.capacity.formats import kv_format, weight_format
from agent.capacity.presets import PRESETS
from agent.cli import main

SHOWN = re.compile(r"```text\n\$ kvatlas (plan .*?)\n(.*?)\n```", re.DOTALL)


@pytest.fixture(scope="module")
def text(repository_root: Path) -> str:
    return (repository_root / "docs" / "capacity.md").read_text(encoding="utf-8")


def test_the_examples_are_what_the_command_prints(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = SHOWN.findall(text)
    assert len(examples) == 2
    for command, printed in examples:
        assert main(shlex.split(command)) == 0
        assert capsys.readouterr().out.rstrip("\n") == printed


def test_every_flag_of_an_engine_is_named(text: str) -> None:
    flags = {
        word
        for recipe in RECIPES.values()
        for said in recipe.flags.values()
        for word in re.findall(r"--[a-z-]{4,}|OLLAMA_[A-Z_]+", said or "")
    } - {"--w-bits", "--w-group-size", "--model-format", "--hicache-size", "--kv-offloading-backend", "--quantize"}
    assert len(flags) > 25
    for flag in flags:
        assert flag in text, flag


@pytest.mark.parametrize(
    ("format", "said"),
    [("fp8", "7.00 GB | 48 %"), ("int8", "7.01 GB | 48 %"), ("awq", "3.89 GB | 71 %"), ("gptq-4-g32", "4.27 GB | 68 %"),
     ("q4_0", "3.79 GB | 72 %"), ("q4_k_m", "4.12 GB | 69 %"), ("q8_0", "7.16 GB | 47 %")],
)  # fmt: skip
def test_the_table_of_weights_is_the_planners(text: str, format: str, said: str) -> None:
    geometry = read_geometry(PRESETS["llama-2-7b"].config)
    assert geometry.parameters is not None
    size = weight_format(format).bytes_of(geometry.parameters, geometry.embedding_parameters, 0)
    saved = 1 - size / (2 * geometry.parameters)
    assert f"{size / 1e9:.2f} GB | {saved:.0%}".replace("%", " %") == said
    assert said in text


@pytest.mark.parametrize(
    ("name", "share"), [("int8", "51.6 %"), ("int4", "26.6 %"), ("nvfp4", "28.1 %"), ("q8_0", "53.1 %")]
)
def test_the_table_of_caches_is_the_planners(text: str, name: str, share: str) -> None:
    assert f"{kv_format(name).of_vector(128) / 256:.1%}".replace("%", " %") == share
    assert share in text
