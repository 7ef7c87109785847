"""`kvatlas plan` and POST /v1/plan: one question, one answer, and errors that name the field."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from agent.capacity.presets import PRESETS
from agent.capacity.request import PlanSettings, plan_settings
from agent.cli import main
from agent.commands.plan import plan
from agent.forecast import ExhaustionForecast
from agent.fragmentation import analyze
from agent.sampling.model import PoolSample, measure_waste
from agent.web.errors import ApiError, add_error_handlers
from agent.web.plan_routes import add_planning
from engine_shim.errors import SettingsError

CONTRACT = {
    "model", "attention", "kv_bytes_per_token", "kv_bytes_per_token_ideal", "kv_bytes_per_block",
    "state_bytes_per_sequence", "memory", "num_blocks", "pool_tokens", "max_concurrent_sequences", "fits", "confidence",
    "warnings", "arithmetic",
}  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["plan", *arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


def facts_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status, out, err = run(capsys, *arguments, "--json")
    assert status == 0, err
    facts: dict[str, Any] = json.loads(out)
    return facts


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "a-model"
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(dict(PRESETS["llama-2-7b"].config)))
    return path


def test_the_keys_that_scripts_rely_on(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    facts = facts_of(capsys, str(config), "--gpu", "A100-80GB", "--kv-dtype", "fp8", "--max-num-seqs", "8")
    assert set(facts) >= CONTRACT
    assert facts["schema"] == "kvatlas.plan/v1"
    assert facts["model"] == "a-model"
    assert facts["kv_bytes_per_token"] == 262_144
    assert facts["fits"] is True
    assert facts["confidence"] == "high"
    assert facts["num_blocks"] * 16 == facts["pool_tokens"]
    assert set(facts_of(capsys, str(config))) >= CONTRACT


def test_every_flag_reaches_the_plan(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    facts = facts_of(
        capsys, str(config), "--gpu-memory", "40", "--tp", "2", "--pp", "2", "--dp", "2", "--weight-dtype", "awq",
        "--kv-dtype", "int8", "--block-size", "32", "--max-model-len", "1000", "--max-num-seqs", "3",
        "--gpu-memory-utilization", "0.8", "--headroom", "0.1", "--max-num-batched-tokens", "100",
        "--activation-memory", "1", "--other-memory", "2", "--co-tenant-memory", "4", "--no-hybrid-manager",
    )  # fmt: skip
    assert (facts["tensor_parallel"], facts["pipeline_parallel"], facts["data_parallel"]) == (2, 2, 2)
    assert (facts["weight_dtype"], facts["kv_dtype"], facts["block_size"]) == ("awq-4-g128", "int8", 32)
    assert (facts["max_model_len"], facts["max_num_seqs"]) == (1000, 3)
    memory = facts["memory"]
    assert memory["budget_bytes"] == int(40 * 2**30 * 0.8)
    assert (memory["activation_bytes"], memory["other_bytes"], memory["co_tenant_bytes"]) == (2**30, 2**31, 2**32)
    assert facts["headroom_blocks"] == facts["num_blocks"] // 10
    pool = facts_of(capsys, str(config), "--kv-cache-memory", "1.5", "--weights-memory", "3")
    assert pool["memory"]["pool_bytes"] == 3 * 2**29
    assert pool["memory"]["weights_bytes"] == 3 * 2**30


def test_settings_may_come_from_the_environment(
    capsys: pytest.CaptureFixture[str], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVATLAS_PLAN_TP", "4")
    assert facts_of(capsys, str(config))["tensor_parallel"] == 4


@pytest.mark.parametrize(
    ("variable", "flag"), [("GPU", "gpu"), ("WEIGHT_DTYPE", "weight-dtype"), ("KV_DTYPE", "kv-dtype")]
)
def test_a_long_text_from_the_environment_is_named_and_shortened(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str, flag: str
) -> None:
    monkeypatch.setenv(f"KVATLAS_PLAN_{variable}", "x" * 300)
    status, out, err = run(capsys, "llama-2-7b")
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {flag}='xxx")
    assert f"--{flag} or KVATLAS_PLAN_{variable}) has 300 characters" in err
    assert "x" * 60 not in err


def test_every_setting_of_the_command_has_the_flag_and_the_variable_that_are_named() -> None:
    """A name in a message that the command does not have would send somebody looking."""
    variables = {
        option for one in inspect.signature(plan, eval_str=True).parameters.values() for option in names_of(one)
    }
    for field in PlanSettings.model_fields:
        if field == "prefix_cache":
            continue  # the API's alone
        with pytest.raises(SettingsError) as refused:
            plan_settings(**{field: object()})
        variable = str(refused.value).partition("or ")[2].partition(")")[0]
        assert variable in variables, field


def names_of(parameter: inspect.Parameter) -> list[str]:
    return [str(one.envvar) for one in getattr(parameter.annotation, "__metadata__", ()) if hasattr(one, "envvar")]


def test_a_preset_brings_its_deployment_and_flags_override_it(capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of(capsys, "llama-2-70b-8xa100")
    assert (facts["gpus"], facts["gpu"], facts["kv_dtype"], facts["fits"]) == (8, "A100-80GB", "fp8", True)
    other = facts_of(capsys, "Llama-2-70B-8xA100", "--kv-dtype", "fp16", "--gpu", "H200")
    assert (other["kv_bytes_per_token"], other["gpu"]) == (2 * facts["kv_bytes_per_token"], "H200")


def test_a_folder_gives_the_weights_of_its_index(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    index = {"metadata": {"total_size": 13_476_831_232}, "weight_map": {}}
    (config.parent / "model.safetensors.index.json").write_text(json.dumps(index))
    facts = facts_of(capsys, str(config.parent), "--gpu-memory", "24")
    assert facts["memory"]["weights_bytes"] == 13_476_831_232
    assert facts["memory"]["weights_source"] == "given"


def test_the_text_says_the_sums(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "llama-2-7b", "--gpu", "RTX-4090", "--max-num-seqs", "16", "--advise")
    assert status == 0
    assert "llama-2-7b: MHA; confidence high" in out
    assert "32 layers × 2 (K, V) × 32 KV heads × 128 × 2 B = 524,288 B a token" in out
    assert "does not fit: 16 × 4,096 tokens" in out
    assert "what to change, best first:" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no/such/file.json",), "there is no file no/such/file.json, and no preset of that name"),
        (("llama-2-7b", "--gpu", "a100"), "gpu 'a100' may be A100-40GB or A100-80GB; name one"),
        (("llama-2-7b", "--gpu", "GB10"), "give --gpu-memory GIB"),
        (("llama-2-7b", "--tp", "3"), "tp=3 does not divide"),
        (("llama-2-7b", "--gpu-memory", "-1"), "gpu-memory=-1: give GiB"),
        (("llama-2-7b", "--gpu-memory", "nan"), "gpu-memory=nan: give GiB"),
        (("llama-2-7b", "--advise"), "advice needs the memory of a GPU"),
        (("llama-2-7b", "--block-size", "x"), "--block-size"),
        (("llama-2-7b", "--tp", "9" * 4000), "is out of range; give 1 to 4096"),
        (("llama-2-7b", "--gpu", "x" * 5000), "(--gpu or KVATLAS_PLAN_GPU) has 5,000 characters of 128 at most"),
        (("llama-2-7b", "--weight-dtype", "x" * 33), "(--weight-dtype or KVATLAS_PLAN_WEIGHT_DTYPE) has 33 characters"),
        (("llama-2-7b", "--kv-dtype", "x" * 33), "of 32 at most; give auto, fp16, fp8, int8, int4"),
        (("llama-2-7b", "--gpu", "\udcff"), "gpu='\\udcff' (--gpu or KVATLAS_PLAN_GPU): "),
        (("a/" * 2000,), "there is no file a/a/"),
        (("a\x1b[31m",), "there is no file a?[31m, and no preset"),
        ((), "Missing argument"),
    ],
)
def test_bad_usage_ends_with_2_and_names_the_field(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert len(err) < 600


@pytest.mark.parametrize(("text", "message"), [("{", "is no JSON"), ("[1]", "holds no JSON object")])
def test_a_file_that_is_no_config_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    status, _, err = run(capsys, str(path))
    assert status == 2
    assert message in err


def test_an_unknown_layout_is_refused_without_a_number(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    path.write_text(json.dumps(dict(PRESETS["llama-2-7b"].config) | {"model_type": "new", "ssm_state_size": 16}))
    status, out, err = run(capsys, str(path))
    assert (status, out) == (1, "")
    assert "ssm_state_size" in err
    status, out, _ = run(capsys, str(path), "--json")
    facts = json.loads(out)
    assert status == 1
    assert facts["confidence"] == "refused"
    assert set(facts) >= CONTRACT
    assert facts["kv_bytes_per_token"] is None


@pytest.fixture
def client(make_snapshot: Any) -> TestClient:
    app = FastAPI()
    add_error_handlers(app)

    async def may_change(request: Request) -> None:
        if request.headers.get("authorization") != "Bearer token":
            raise ApiError(401, "unauthorized", "no token", "send one")

    snapshot = make_snapshot([4] + [2] * 5 + [1] * 2 + [0] * 2)
    pool = PoolSample(
        id="engine.kv",
        state="live",
        reason="",
        snapshot=snapshot,
        report=analyze(snapshot.states),
        fragmentation_known=True,
        waste=measure_waste(snapshot),
        oldest_pinned_seconds=None,
        forecast=ExhaustionForecast(None, "no trend"),
        tokens_per_second=None,
        torn_reads=0,
        read_seconds=0.001,
    )

    def sample(id: str) -> PoolSample:
        if id != pool.id:
            raise ApiError(404, "not_found", f"no pool {id!r}", "GET /v1/engines")
        return pool

    add_planning(app, sample, may_change)
    return TestClient(app, headers={"authorization": "Bearer token"})


def test_the_route_answers_as_the_command(client: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"preset": "llama-2-7b", "gpu": "A100-80GB", "kv_dtype": "fp8", "max_num_seqs": 8, "advise": True}
    answer = client.post("/v1/plan", json=asked)
    assert answer.status_code == 200
    body = answer.json()
    command = facts_of(
        capsys, "llama-2-7b", "--gpu", "A100-80GB", "--kv-dtype", "fp8", "--max-num-seqs", "8", "--advise"
    )
    assert body == command
    own = client.post("/v1/plan", json={"config": dict(PRESETS["llama-2-7b"].config), "model": "mine"}).json()
    assert (own["model"], own["kv_bytes_per_token"], own["advice"]) == ("mine", 524_288, None)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "give either config"),
        ({"preset": "llama-2-7b", "config": {}}, "give either config"),
        ({"preset": "llama-9"}, "no preset 'llama-9'"),
        ({"config": {"model_type": "llama"}}, "num_hidden_layers"),
        ({"preset": "llama-2-7b", "tp": "two"}, "tp='two'"),
        ({"preset": "llama-2-7b", "tp": "2"}, "tp='2'"),
        ({"preset": "llama-2-7b", "tp": True}, "tp=True"),
        ({"preset": "llama-2-7b", "hybrid_manager": "no"}, "hybrid_manager='no'"),
        ({"config": dict(PRESETS["llama-2-7b"].config) | {"model_type": "\x1b[31m"}}, "no name that can be shown"),
        ({"preset": "llama-2-7b", "tp": 5}, "tp=5 does not divide"),
        ({"preset": "llama-2-7b", "tpp": 5}, "tpp"),
    ],
)
def test_the_route_refuses_by_name(client: TestClient, asked: dict[str, Any], message: str) -> None:
    answer = client.post("/v1/plan", json=asked)
    assert answer.status_code == 400
    assert answer.json()["error"] == "bad_request"
    assert message in answer.json()["message"]


def test_the_route_refuses_an_unknown_layout_without_a_number(client: TestClient) -> None:
    config = dict(PRESETS["llama-2-7b"].config) | {"model_type": "new", "rwkv_size": 3}
    answer = client.post("/v1/plan", json={"config": config})
    assert answer.status_code == 200
    assert answer.json()["confidence"] == "refused"
    assert answer.json()["kv_bytes_per_token"] is None


def test_the_route_asks_for_the_writers_token(client: TestClient) -> None:
    refused = client.post("/v1/plan", json={"preset": "llama-2-7b"}, headers={"authorization": "Bearer none"})
    assert refused.status_code == 401


def test_the_route_advises_an_engine_that_runs(client: TestClient) -> None:
    answer = client.get("/v1/engines/engine.kv/advice").json()
    assert answer["schema"] == "kvatlas.advise/v1"
    assert answer["memory_is_short"] is False
    assert answer["live_share"] == pytest.approx(5 / 9)
    assert {one["option"] for one in answer["options"]} >= {"kv-fp8", "block-size", "allocation-policy"}
    assert client.get("/v1/engines/nobody/advice").status_code == 404


def test_every_choice_that_is_offered_is_one(client: TestClient) -> None:
    choices = client.get("/v1/plan", headers={"authorization": ""}).json()
    assert choices["schema"] == "kvatlas.plan-choices/v1"
    assert {"llama-3.1-8b", "deepseek-v3"} <= set(choices["presets"])
    assert {one["name"]: one["memory_bytes"] for one in choices["gpus"]}["A100-80GB"] == int(79.14 * 2**30)
    # fp8_ds_mla is for the layers of DeepSeek alone; a card that shares the host's memory wants its part named.
    asked = [{"preset": "llama-2-7b", "kv_dtype": one} for one in choices["kv_dtypes"] if one != "fp8_ds_mla"]
    asked += [{"preset": "llama-2-7b", "weight_dtype": one} for one in choices["weight_dtypes"]]
    asked += [{"preset": one, "gpu": "H100-80GB", "advise": True} for one in choices["presets"]]
    asked += [
        {"preset": "llama-2-7b", "gpu": one["name"]} for one in choices["gpus"] if one["memory_bytes"] is not None
    ]
    refused = [(one, answer.text) for one in asked if (answer := client.post("/v1/plan", json=one)).status_code != 200]
    assert refused == []
