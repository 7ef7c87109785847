"""The planner's form and answers as text of the page."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.capacity.request import PlanRequest
from agent.wire.plan import PlanAnswer
from dashboard import plan_words
from dashboard.palette import LIGHT
from dashboard.plan_words import Form, NotAConfig


def form(**changes: Any) -> Form:
    fields: dict[str, Any] = {
        "preset": "llama-2-7b",
        "config": None,
        "model": None,
        "gpu": "A100-80GB",
        "gpu_memory_gib": None,
        "tp": 1,
        "kv_dtype": "auto",
        "weight_dtype": "auto",
        "block_size": 16,
        "max_model_len": None,
        "max_num_seqs": 1,
        "utilization": 0.9,
        "headroom": 0.0,
        "co_tenant_gib": 0.0,
    }
    return Form(**{**fields, **changes})


def ask(given: Form) -> PlanAnswer:
    """As the agent answers."""
    answer = PlanRequest.model_validate_json(json.dumps(given.to_json())).ask().to_json()
    return PlanAnswer.model_validate(answer)


def test_every_field_reaches_the_planner() -> None:
    base = ask(form())
    changes: list[dict[str, Any]] = [
        {"preset": "llama-2-13b"},
        {"gpu": "L4"},
        {"gpu": None, "gpu_memory_gib": 40.0},
        {"tp": 2},
        {"kv_dtype": "fp8"},
        {"weight_dtype": "int8"},
        {"block_size": 32},
        {"max_model_len": 2048},
        {"max_num_seqs": 40},
        {"utilization": 0.5},
        {"headroom": 0.1},
        {"co_tenant_gib": 70.0},
    ]
    for change in changes:
        assert plan_words.plan_html(ask(form(**change)), LIGHT) != plan_words.plan_html(base, LIGHT), change


def test_a_plan_that_does_not_fit_says_what_is_missing_and_what_to_do() -> None:
    found = ask(form(gpu="A10", max_num_seqs=4))
    text = plan_words.plan_html(found, LIGHT)
    assert found.fits is False
    assert "are missing" in text
    assert all(line.split(":")[0] in text for line in found.arithmetic)
    advice = plan_words.advice_html(found)
    assert "fits then" in advice
    assert "Ruled out" in advice
    fitting = plan_words.advice_html(ask(form()))
    assert "fits then" not in fitting  # it fits already


def test_a_layout_that_is_not_known_gives_no_number() -> None:
    refused = PlanAnswer(
        schema="kvatlas.plan/v1",
        model="x",
        attention=None,
        kv_bytes_per_token=None,
        kv_bytes_per_token_ideal=None,
        kv_bytes_per_block=None,
        state_bytes_per_sequence=None,
        memory=None,
        num_blocks=None,
        pool_tokens=None,
        max_concurrent_sequences=None,
        fits=None,
        confidence="refused",
        warnings=["<i>unknown</i> layout"],
        arithmetic=[],
    )
    text = plan_words.plan_html(refused, LIGHT)
    assert "&lt;i&gt;unknown&lt;/i&gt; layout" in text
    assert "kv-tile" not in text
    assert plan_words.advice_html(refused) == ""


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"{", "no JSON"),
        (b"[1]", "no JSON object"),
        (b"\xff", "no JSON"),
        (b'{"a": NaN}', "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b" " * (plan_words.MAX_CONFIG_BYTES + 1), "larger than 2 MiB"),
    ],
)
def test_what_is_no_config_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(NotAConfig, match=why):
        plan_words.read_config(data)


def test_a_config_may_begin_with_a_mark() -> None:
    assert plan_words.read_config(b'\xef\xbb\xbf{"model_type": "llama"}') == {"model_type": "llama"}


def test_what_is_left_alone_is_planned_as_the_command_plans_it() -> None:
    """`kvatlas plan` sends no number of sequences where none is given."""
    asked = form(max_num_seqs=None).to_json()
    assert "max_num_seqs" not in asked
    plain = PlanRequest(preset="llama-3.1-8b", gpu="A100-80GB").ask().to_json()
    assert ask(form(preset="llama-3.1-8b", max_num_seqs=None)).memory == plain["memory"]
    assert ask(form(preset="llama-3.1-8b", max_num_seqs=1)).memory != plain["memory"]


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        ({"sequences": 1, "tokens": 16, "gpus": -1}, "+1 sequence, +16 tokens, -1 GPU"),
        ({"sequences": 2, "tokens": 1, "gpus": 2}, "+2 sequences, +1 token, +2 GPUs"),
    ],
)
def test_one_more_is_no_plural(gain: dict[str, int], words: str) -> None:
    option = {"possible": True, "title": "t", "change": "c", "gain": gain, "fits": None}
    assert words in plan_words.advice_html(ask(form()).model_copy(update={"advice": [option]}))


def test_numbers_of_rows_stay_whole() -> None:
    assert '<td class="kv-number">1</td>' in plan_words.advice_html(ask(form(gpu="A10", max_num_seqs=4)))
