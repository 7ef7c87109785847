"""Renders deploy/kubernetes as kustomize does, as far as its files go, so that tests need no binary.

Resources, components, strategic-merge patches with a target, image names and label pairs; a field that is not known
here is an error and not left out. Lists merge by the keys of the Kubernetes API.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]

KNOWN = {"apiVersion", "kind", "resources", "components", "patches", "labels", "images"}
# By which field the elements of a list are told apart, as the API's patchMergeKey says.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}


def render(folder: Path) -> list[Resource]:
    """What `kustomize build FOLDER` gives, without the order. Raises ValueError for what is not understood."""
    return _build(folder, [])


def _build(folder: Path, given: list[Resource]) -> list[Resource]:
    wanted = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    if unknown := set(wanted) - KNOWN:
        raise ValueError(f"{folder}: {sorted(unknown)} is not rendered here")
    resources = list(given)
    for name in wanted.get("resources", ()):
        path = folder / name
        resources += _build(path, []) if path.is_dir() else list(_documents(path))
    for name in wanted.get("components", ()):
        resources = _build(folder / name, resources)
    for patch in wanted.get("patches", ()):
        (change,) = _documents(folder / patch["path"])
        targets = [one for one in resources if _is_target(one, patch["target"])]
        if not targets:
            raise ValueError(f"{folder}: {patch['path']} finds nothing to change")
        for one in targets:
            named = one["metadata"]["name"]
            merge(one, change)
            one["metadata"]["name"] = named
    for pair in wanted.get("labels", ()):
        for one in resources:
            one["metadata"].setdefault("labels", {}).update(pair["pairs"])
    for image in wanted.get("images", ()):
        for container in (one for resource in resources for one in containers(resource)):
            if container.get("image") == image["name"]:
                container["image"] = f"{image['name']}:{image['newTag']}"
    names = [(one["kind"], one["metadata"]["name"]) for one in resources]
    if len(names) != len(set(names)):
        raise ValueError(f"{folder}: a resource is there twice")
    return resources


def containers(resource: Resource) -> Iterator[Resource]:
    """Every container of a Deployment, those that run first as well."""
    spec = resource.get("spec", {}).get("template", {}).get("spec", {})
    yield from spec.get("initContainers", ())
    yield from spec.get("containers", ())


def merge(into: Resource, change: Mapping[str, Any]) -> None:
    """A strategic merge without deletions: what a patch names of a list with keys comes first, as kustomize puts it."""
    for key, value in change.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            merge(into[key], value)
        elif isinstance(value, list) and isinstance(into.get(key), list) and key in MERGE_KEYS:
            there = {one[MERGE_KEYS[key]]: one for one in into[key]}
            first = []
            for one in value:
                named = there.pop(one[MERGE_KEYS[key]], {})
                merge(named, one)
                first.append(named)
            into[key] = [*first, *there.values()]
        else:
            into[key] = copy.deepcopy(value)


def _is_target(resource: Resource, target: Mapping[str, str]) -> bool:
    labels = resource["metadata"].get("labels", {})
    key, _, value = target["labelSelector"].partition("=")
    return bool(resource["kind"] == target["kind"] and labels.get(key) == value)


def _documents(path: Path) -> Iterator[Resource]:
    yield from (one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one is not None)
