"""deploy/kubernetes: manifests that the API takes, that fit together, and that a security review passes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from agent.config import AgentSettings, variable
from tests.deploy.kustomize import Resource, containers, merge, render

OVERLAYS = (
    "base",
    "overlays/vllm",
    "overlays/vllm-acting",
    "examples/keda",
    "examples/hpa",
    "examples/gateway",
)
OLDEST, NEWEST = "1.29", "1.37"  # the first with native sidecars on by default, and the last that the validator knows
# Of operators, so that their schemas are not Kubernetes' own.
CUSTOM = {"PodMonitor", "PrometheusRule", "ScaledObject", "InferencePool", "HTTPRoute"}


@pytest.fixture(scope="module")
def folder(repository_root: Path) -> Path:
    return repository_root / "deploy" / "kubernetes"


@pytest.fixture(scope="module")
def vllm(folder: Path) -> list[Resource]:
    return render(folder / "overlays" / "vllm")


@pytest.fixture(scope="module")
def acting(folder: Path) -> list[Resource]:
    return render(folder / "overlays" / "vllm-acting")


def only(resources: list[Resource], kind: str, name: str) -> Resource:
    (found,) = (one for one in resources if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def pod(resource: Resource) -> dict[str, Any]:
    spec: dict[str, Any] = resource["spec"]["template"]["spec"]
    return spec


def validate(resource: Resource, version: str) -> None:
    kubernetes_validate.validate(resource, version, strict=True)


def test_the_api_takes_every_manifest(folder: Path) -> None:
    """Strictly: a field that the API does not know is an error."""
    checked: list[Resource] = []
    for resource in (one for overlay in OVERLAYS for one in render(folder / overlay)):
        if resource["kind"] not in CUSTOM and resource not in checked:
            validate(resource, NEWEST)
            checked.append(resource)
    assert {one["kind"] for one in checked} == {"Deployment", "Service", "NetworkPolicy", "HorizontalPodAutoscaler"}


def test_a_cluster_with_the_first_native_sidecars_takes_them(acting: list[Resource]) -> None:
    for resource in acting:
        if resource["kind"] == "Deployment":
            validate(resource, OLDEST)
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(only(acting, "Deployment", "vllm"), "1.27")


def test_a_misspelt_field_is_noticed(vllm: list[Resource]) -> None:
    """The negative control of the two above."""
    wrong = copy.deepcopy(only(vllm, "Deployment", "vllm"))
    pod(wrong)["securityContext"]["fsgroup"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(wrong, NEWEST)


def test_every_file_is_part_of_something(folder: Path) -> None:
    """No manifest lies about that no kustomization names, and none names what is not there."""
    named = set()
    for path in folder.rglob("kustomization.yaml"):
        wanted = yaml.safe_load(path.read_text(encoding="utf-8"))
        entries = [*wanted.get("resources", ()), *wanted.get("components", ())]
        entries += [patch["path"] for patch in wanted.get("patches", ())]
        for entry in entries:
            found = (path.parent / entry).resolve()
            assert found.exists(), f"{path}: {entry}"
            named.add(found)
    others = {
        path for path in folder.rglob("*.yaml") if path.name not in ("kustomization.yaml", "prometheus-adapter.yaml")
    }
    assert others == {path for path in named if path.is_file()}


# Security


def faults(container: dict[str, Any], of_the_pod: dict[str, Any], *, ours: bool) -> list[str]:
    """What a review would object to in a container."""
    context = {**of_the_pod, **container.get("securityContext", {})}
    wanted = {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if ours:
        wanted |= {"readOnlyRootFilesystem": True, "runAsUser": 10001, "runAsGroup": 10001}
    found = [name for name, value in wanted.items() if context.get(name) != value]
    found += ["runAsUser"] if not context.get("runAsUser") else []
    found += ["privileged"] if context.get("privileged") else []
    resources = container.get("resources", {})
    found += ["memory"] if "memory" not in resources.get("limits", {}) else []
    found += ["requests"] if not {"cpu", "memory"} <= set(resources.get("requests", {})) else []
    found += ["image"] if not container["image"].rpartition(":")[2][:1].isdigit() and ours else []
    return found


def test_every_container_is_confined(acting: list[Resource]) -> None:
    deployments = [one for one in acting if one["kind"] == "Deployment"]
    assert {one["metadata"]["name"] for one in deployments} == {"vllm", "kvatlas-dashboard"}
    for deployment in deployments:
        spec = pod(deployment)
        assert not {"hostPID", "hostNetwork", "hostIPC"} & set(spec)
        assert spec["automountServiceAccountToken"] is False
        assert not [one for one in spec["volumes"] if "hostPath" in one]
        for container in containers(deployment):
            ours = container["image"].startswith("kvatlas-")
            assert faults(container, spec["securityContext"], ours=ours) == [], container["name"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"securityContext": {"readOnlyRootFilesystem": False}}, "readOnlyRootFilesystem"),
        ({"securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}}, "capabilities"),
        ({"securityContext": {"runAsUser": 0}}, "runAsUser"),
        ({"securityContext": {"privileged": True}}, "privileged"),
        ({"resources": {"limits": None}}, "memory"),
    ],
)
def test_a_container_that_is_not_is_noticed(acting: list[Resource], change: dict[str, Any], fault: str) -> None:
    deployment = copy.deepcopy(only(acting, "Deployment", "vllm"))
    (agent,) = (one for one in containers(deployment) if one["name"] == "kvatlas-agent")
    merge(agent, change)
    if agent["resources"]["limits"] is None:
        del agent["resources"]["limits"]
    assert fault in faults(agent, pod(deployment)["securityContext"], ours=True)


def test_without_the_acting_component_nothing_can_be_changed(vllm: list[Resource], acting: list[Resource]) -> None:
    for resources, acts in ((vllm, False), (acting, True)):
        deployment = only(resources, "Deployment", "vllm")
        (agent,) = (one for one in containers(deployment) if one["name"] == "kvatlas-agent")
        (engine,) = (one for one in containers(deployment) if one["name"] == "engine")
        settings = environment(agent)
        assert settings["KVATLAS_COMPACTION"] == ("all" if acts else "off")
        assert ("KVATLAS_TOKEN_FILE" in settings) is acts
        assert ("KVATLAS_VLLM_ALLOCATION" in environment(engine)) is acts
        # Without a token and beyond loopback the agent itself refuses every change.
        assert not settings["KVATLAS_LISTEN"].startswith(("127.", "localhost"))


def test_no_secret_lies_in_a_manifest(folder: Path) -> None:
    for path in folder.rglob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            assert document is None or document.get("kind") != "Secret", path


# How the parts fit together


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: str(one.get("value", one.get("valueFrom"))) for one in container.get("env", ())}


def named_ports(resource: Resource) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for one in containers(resource) for port in one.get("ports", ())}


def selected(resources: list[Resource], wanted: dict[str, str]) -> list[Resource]:
    return [
        one
        for one in resources
        if one["kind"] == "Deployment" and wanted.items() <= one["spec"]["template"]["metadata"]["labels"].items()
    ]


def test_services_monitor_and_policies_find_their_pods_and_ports(vllm: list[Resource]) -> None:
    for service in (one for one in vllm if one["kind"] == "Service"):
        (found,) = selected(vllm, service["spec"]["selector"])
        for port in service["spec"]["ports"]:
            assert named_ports(found)[port["targetPort"]] == port["port"]
    monitor = only(vllm, "PodMonitor", "kvatlas")["spec"]
    (watched,) = selected(vllm, monitor["selector"]["matchLabels"])
    assert {one["port"] for one in monitor["podMetricsEndpoints"]} <= set(named_ports(watched))
    for policy in (one for one in vllm if one["kind"] == "NetworkPolicy"):
        (found,) = selected(vllm, policy["spec"]["podSelector"]["matchLabels"])
        open_ports = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        assert open_ports == set(named_ports(found).values())


def test_discovery_names_every_pod_with_an_agent(vllm: list[Resource]) -> None:
    service = only(vllm, "Service", "kvatlas-agents")["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    (dashboard,) = containers(only(vllm, "Deployment", "kvatlas-dashboard"))
    address = environment(dashboard)["KVATLAS_AGENT_URL"]
    assert address == f"http://kvatlas-agents:{service['ports'][0]['port']}"


def volumes_of(container: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    for one in container["volumeMounts"]:
        yield one["name"], one["mountPath"], one.get("readOnly", False)


def test_engine_and_agent_share_the_map_folder_alone(vllm: list[Resource]) -> None:
    deployment = only(vllm, "Deployment", "vllm")
    by_name = {one["name"]: one for one in containers(deployment)}
    engine, agent = by_name["engine"], by_name["kvatlas-agent"]
    assert agent["restartPolicy"] == "Always"
    assert "readinessProbe" not in agent
    folders = {environment(one)["KVATLAS_DIR"] for one in (engine, agent)}
    assert len(folders) == 1
    shared = {(name, path) for name, path, _ in volumes_of(engine)} & {
        (name, path) for name, path, _ in volumes_of(agent)
    }
    assert shared == {("kvatlas-maps", folders.pop())}
    assert ("kvatlas-maps", "/run/kvatlas", True) in set(volumes_of(agent))
    assert ("kvatlas-maps", "/run/kvatlas", False) in set(volumes_of(engine))
    volumes = {one["name"]: one for one in pod(deployment)["volumes"]}
    assert volumes["kvatlas-maps"]["emptyDir"]["medium"] == "Memory"
    # Another user than the engine's reads the map by the volume's group.
    assert engine["securityContext"]["runAsUser"] != agent["securityContext"]["runAsUser"]
    assert pod(deployment)["securityContext"]["fsGroup"] == agent["securityContext"]["runAsGroup"]


def test_every_mount_has_its_volume(acting: list[Resource]) -> None:
    for deployment in (one for one in acting if one["kind"] == "Deployment"):
        volumes = {one["name"] for one in pod(deployment)["volumes"]}
        mounted = {name for one in containers(deployment) for name, _, _ in volumes_of(one)}
        assert mounted == volumes


def test_every_setting_is_one(acting: list[Resource], repository_root: Path) -> None:
    documented = (repository_root / "docs" / "settings.md").read_text(encoding="utf-8")
    for deployment in (one for one in acting if one["kind"] == "Deployment"):
        for container in containers(deployment):
            names = [name for name in environment(container) if name.startswith("KVATLAS_")]
            assert [name for name in names if f"`{name}`" not in documented] == []
            if container["name"] == "kvatlas-agent":
                assert set(names) <= {variable(name) for name in AgentSettings.model_fields}


def test_the_settings_of_the_agent_can_be_read(acting: list[Resource]) -> None:
    by_name = {one["name"]: one for one in containers(only(acting, "Deployment", "vllm"))}
    given = environment(by_name["kvatlas-agent"])
    values = {name.removeprefix("KVATLAS_").lower(): value for name, value in given.items()}
    values["engine_metrics"] = (values["engine_metrics"],)  # type: ignore[assignment]
    settings = AgentSettings(**values)  # type: ignore[arg-type]
    assert settings.address[1] == 9477
    volumes = {one["name"]: one for one in pod(only(acting, "Deployment", "vllm"))["volumes"]}
    assert volumes["kvatlas-state"]["emptyDir"]["sizeLimit"] == "1Gi"
    assert settings.state_max_mib + 256 < 1024  # the history and the black boxes
