"""Routing: the numbers that a picker is pointed at are exported, and the route leads to the pool."""

from __future__ import annotations

from pathlib import Path

from tests.deploy.kustomize import render
from tests.deploy.test_grafana import NAME, unknown_names


def test_a_picker_is_pointed_at_numbers_that_there_are(repository_root: Path) -> None:
    page = (repository_root / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    _, _, said = page.partition("\n## Routing\n")
    said = said.partition("\n## ")[0]
    assert len(NAME.findall(said)) >= 2
    assert unknown_names(said, repository_root) == set()
    assert unknown_names(said.replace("used_ratio", "used_part"), repository_root) == {"kvatlas_pool_used_part"}


def test_the_route_leads_to_the_pool(repository_root: Path) -> None:
    made = {one["kind"]: one for one in render(repository_root / "deploy" / "kubernetes" / "examples" / "gateway")}
    (rule,) = made["HTTPRoute"]["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    pool = made["InferencePool"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    assert pool["apiVersion"].partition("/")[0] == backend["group"]
