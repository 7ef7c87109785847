"""The view of memory in a real browser, beside the API: a host without a GPU, two engines, and the planner."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from agent.client import AgentClient
from dashboard.wording import count, size

pytestmark = pytest.mark.browser

VIEW = ".st-key-view_memory"
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}


@pytest.fixture(scope="module")
def world(shared_stage: Any, eventually: Callable[..., Any]) -> dict[str, Any]:
    """An agent without a token, so that a page on the same machine may plan."""
    steady = shared_stage.pool("steady", 2500)
    steady.send("churn 40")
    agent_url, _ = shared_stage.agent(interval_seconds="0.5", devices_seconds="0.5")
    client = AgentClient(agent_url, timeout_seconds=60.0)
    eventually(lambda: client.devices().engines and client.devices().host, "memory was read")
    dashboard_url, _ = shared_stage.dashboard(agent_url)
    return {"steady": steady, "client": client, "dashboard": dashboard_url}


def tile(page: Page, label: str) -> Any:
    return page.locator(f"{VIEW} .kv-tile").filter(has=page.get_by_text(label, exact=True)).locator(".kv-value")


def picture_of_the_planner(page: Page, folder: Path) -> None:
    """Of what is the same on every machine."""
    page.set_viewport_size({"width": 1280, "height": 2600})
    box = page.get_by_role("heading", name="Planner").bounding_box()
    assert box is not None
    page.screenshot(
        path=folder / "dashboard-memory.png", clip={"x": 0, "y": box["y"] - 8, "width": 1280, "height": 1000}
    )
    page.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_says_what_the_api_says(
    scheme: str, world: dict[str, Any], window: Callable[..., Any], repository_root: Path, tmp_path: Path
) -> None:
    opened = window(world["dashboard"], color_scheme=scheme)
    page = opened.open(world["steady"].id, view="memory")
    found = world["client"].devices()
    view = page.locator(VIEW)
    assert found.host is not None
    expect(view.get_by_role("heading", name="Devices")).to_contain_text(f"NVML: {found.nvml}")
    for device in found.devices:
        expect(view).to_contain_text(device.uuid or device.gpu)
    if not found.devices:
        expect(view).to_contain_text(found.nvml_reason)  # why there is none
    host = view.locator("tr").filter(has_text="host").first
    expect(host).to_contain_text(f"of {size(found.host.total_bytes)}")
    (engine,) = found.engines
    row = view.locator("tr").filter(has_text="steady").first
    expect(row).to_contain_text(str(engine.pid))
    expect(row).to_contain_text("resident")
    (allocator,) = found.allocators
    expect(view).to_contain_text(allocator.reason)
    pool = world["client"].advice(world["steady"].id)
    expect(view).to_contain_text(pool.verdict)

    planned = world["client"].plan({"preset": "llama-3.1-8b", "gpu": "A100-80GB", "advise": True})
    expect(tile(page, "Pool")).to_have_text(size(planned.memory["pool_bytes"]))
    expect(tile(page, "Tokens")).to_have_text(count(planned.pool_tokens))
    expect(tile(page, "Sequences")).to_have_text(count(planned.max_concurrent_sequences))
    for line in planned.arithmetic:
        expect(view.locator("li").filter(has_text=line).first).to_be_visible()
    best = next(one for one in planned.advice if one["possible"])
    expect(view.locator("tr").filter(has_text=best["change"]).first).to_contain_text(best["title"])
    expect(page.get_by_role("slider", name="Held by other processes, GiB")).to_be_attached()
    if scheme == "light":
        update = os.environ.get("KVATLAS_UPDATE_SCREENSHOTS") == "1"
        picture_of_the_planner(page, repository_root / "docs" / "images" if update else tmp_path)
    opened.check()
    opened.check_keyboard()
    page.set_viewport_size({"width": 1920, "height": 1080})
    expect(tile(page, "Pool")).to_be_visible()
    opened.check()


def test_advice_follows_the_pool(
    world: dict[str, Any], window: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    """By itself: nobody chooses anything meanwhile."""
    opened = window(world["dashboard"])
    page = opened.open(world["steady"].id, view="memory")
    before = world["client"].advice(world["steady"].id).verdict
    expect(page.locator(VIEW)).to_contain_text(before)

    def other() -> str:
        world["steady"].send("churn 3")
        verdict: str = world["client"].advice(world["steady"].id).verdict
        return verdict if verdict != before else ""

    eventually(other, "the pool's own advice is another")
    expect(page.locator(VIEW)).not_to_contain_text(before)
    expect(page.locator(VIEW)).to_contain_text(world["client"].advice(world["steady"].id).verdict)


def test_sliders_answer_what_if(world: dict[str, Any], window: Callable[..., Any]) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["steady"].id, view="memory")
    asked = {"preset": "llama-3.1-8b", "gpu": "A100-80GB"}
    expect(tile(page, "Tokens")).to_have_text(count(world["client"].plan(asked).pool_tokens))
    page.get_by_role("slider", name="Tensor-parallel GPUs").press("ArrowRight")
    expect(tile(page, "Tokens")).to_have_text(count(world["client"].plan(asked | {"tp": 2}).pool_tokens))
    page.get_by_role("combobox", name="KV dtype").click()
    page.get_by_role("option", name="fp8", exact=True).click()
    halved = world["client"].plan(asked | {"tp": 2, "kv_dtype": "fp8"})
    expect(tile(page, "Tokens")).to_have_text(count(halved.pool_tokens))
    expect(tile(page, "KV a token")).to_have_text(size(halved.kv_bytes_per_token))
    page.get_by_role("slider", name="Such sequences at once").press("End")
    expect(tile(page, "Fits")).to_have_text("no")


def test_a_config_can_be_uploaded_and_a_wrong_one_is_refused(
    world: dict[str, Any], window: Callable[..., Any], tmp_path: Path
) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["steady"].id, view="memory")
    page.locator(f"{VIEW} .st-key-plan_source").get_by_text("a config.json").click()
    wrong, right, unknown = tmp_path / "wrong.json", tmp_path / "tiny.json", tmp_path / "unknown.json"
    wrong.write_text("{nothing}")
    right.write_text(json.dumps(CONFIG))
    unknown.write_text(json.dumps(CONFIG | {"model_type": "somebody_elses"}))
    field = page.locator(f"{VIEW} input[type=file]")
    field.set_input_files(wrong)
    expect(page.get_by_text("The file is no JSON")).to_be_visible()
    field.set_input_files(right)
    planned = world["client"].plan({"config": CONFIG, "gpu": "A100-80GB"})
    expect(tile(page, "Tokens")).to_have_text(count(planned.pool_tokens))
    field.set_input_files(unknown)
    refused = world["client"].plan({"config": CONFIG | {"model_type": "somebody_elses"}, "gpu": "A100-80GB"})
    expect(page.locator(f"{VIEW} .kv-warning").filter(has_text=refused.warnings[0]).first).to_be_visible()


def test_the_figures_can_be_taken_along(world: dict[str, Any], window: Callable[..., Any]) -> None:
    opened = window(world["dashboard"])
    page = opened.open(world["steady"].id, view="memory")
    expect(page.locator(VIEW)).to_contain_text("resident")
    with page.expect_download() as download:
        page.locator(".st-key-export_memory").get_by_role("button", name="JSON").click()
    rows = json.loads(Path(download.value.path()).read_text())["rows"]
    found = world["client"].devices()
    totals = [row["bytes"] for row in rows if (row["of"], row["what"]) == ("host", "total_bytes")]
    assert totals == [found.host.total_bytes]
    assert [row["pid"] for row in rows if row["what"] == "resident"] == [one.pid for one in found.engines]
