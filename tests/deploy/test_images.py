"""deploy/docker: its steps, done in a bare Debian, and what comes of them, run as a pod runs it.

Needs root, for roots and namespaces of its own; the bare root is made with debootstrap the first time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.dockerfile import Builder, Stage, Step, parse

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount file systems: run the tests as root")
NOBODY_IN_PARTICULAR = "10001\t10001\t10001\t10001"
BUILT = ("shim", "agent", "dashboard")


@pytest.fixture(scope="module")
def session(repository_root: Path) -> dict[str, Any]:
    """What one build of all images and one pod of them showed."""
    with tempfile.TemporaryDirectory(prefix="kvatlas-test-") as name:
        settings, work = Path(name) / "settings", Path(name) / "work"
        settings.mkdir()
        work.mkdir()
        prepare: list[str | Path] = [repository_root / "scripts" / "image_roots.sh", settings]
        prepared = subprocess.run(prepare, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        assert prepared.returncode == 0, prepared.stderr
        bare, *folders = prepared.stdout.split()
        retries = settings / "etc" / "apt" / "apt.conf.d" / "99retries"
        retries.parent.mkdir(parents=True, exist_ok=True)
        retries.write_text('Acquire::Retries "5";\n')
        script = Path(__file__).with_name("image_session.py")
        command = [sys.executable, str(script), *map(str, (repository_root, work, bare, settings)), *folders]
        # What is mounted in a namespace of mounts is gone with its last process, however that ends.
        apart = ["unshare", "--mount", "--propagation", "private", *command]
        ran = subprocess.run(apart, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        assert ran.returncode == 0, ran.stderr[-6000:]
        seen: dict[str, Any] = json.loads(ran.stdout)
        return seen


@needs_root
def test_each_image_runs_as_nobody_in_particular_without_any_capability(session: dict[str, Any]) -> None:
    assert session["users"] == dict.fromkeys(BUILT, "10001:10001")
    for name in ("agent", "dashboard"):
        status = session[name]["status"]
        assert (status["Uid"], status["Gid"]) == (NOBODY_IN_PARTICULAR, NOBODY_IN_PARTICULAR)
        assert {status[one] for one in ("CapPrm", "CapEff", "CapBnd")} == {"0" * 16}
        assert status["NoNewPrivs"] == "1"


@needs_root
def test_each_image_needs_to_write_nowhere_but_where_it_is_told(session: dict[str, Any]) -> None:
    assert session["agent"]["writable"] == session["dashboard"]["writable"] == []
    assert session["agent"]["writable_where_wanted"] == ["/tmp/x", "/var/lib/kvatlas/x"]  # the negative control


@needs_root
def test_the_shim_s_image_lays_the_shim_into_the_volume(session: dict[str, Any]) -> None:
    assert (session["shim"]["exit"], session["shim"]["said"]) == (0, "")
    files = session["shim"]["files"]
    assert "engine_shim" in files
    assert [one for one in files if one.endswith(".dist-info")]  # by which vLLM finds the plugin
    assert not {"agent", "alerts", "dashboard", "numpy"} & set(files)


@needs_root
def test_the_agent_watches_an_engine_of_another_user_in_another_container(session: dict[str, Any]) -> None:
    """Nothing is shared but the volume in memory, which the agent has read-only."""
    agent = session["agent"]
    assert agent["engine_user"] == "2000"
    assert 'kvatlas_engine_up{engine_id="pod-7"' in agent["metrics"]
    findings = {one["check"]: one for one in agent["doctor"]["findings"]}
    assert agent["doctor"]["ok"] is True
    assert "mounted read-only: enough for an agent" in findings["folder /run/kvatlas"]["message"]
    assert "its writer lives" in findings["map pod-7.dp0.tp0.pp0.kv"]["message"]
    assert "shareProcessNamespace" in findings["process of pod-7.dp0.tp0.pp0.kv"]["action"]
    assert "--shm-size" in findings["shared memory"]["action"]


@needs_root
def test_the_agent_lets_nobody_change_anything_and_ends_in_good_order(session: dict[str, Any]) -> None:
    assert session["agent"]["change"] == 403
    assert session["agent"]["exit"] == 0


@needs_root
def test_the_dashboard_serves_its_page(session: dict[str, Any]) -> None:
    status, page = session["dashboard"]["page"]
    assert status == 200
    assert '<div id="root">' in page


# What does the building


def test_the_dockerfile_is_read_whole(repository_root: Path) -> None:
    stages = parse((repository_root / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8"))
    assert set(BUILT) <= set(stages)
    assert stages["agent"].parent == "python"
    assert stages["python"].parent == "debian:bookworm-slim"
    for name in ("agent", "dashboard"):
        words = [step.word for step in stages[name].steps]
        assert words.count("HEALTHCHECK") == words.count("USER") == words.count("ENTRYPOINT") == 1
        assert "RUN" not in words  # nothing is built in an image that runs
    assert {path.name for path in (repository_root / "deploy" / "docker").iterdir()} == {
        "Dockerfile",
        "Dockerfile.dockerignore",
        "vllm.Dockerfile",
    }


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step("COPY", "tests ."), "the .dockerignore leaves it out"),
        (Step("COPY", "agent/nothing.py ./"), "there is no such file"),
        (Step("VOLUME", "/x"), "VOLUME is not done here"),
    ],
)
def test_a_step_that_would_fail_or_is_not_known_is_an_error(
    repository_root: Path, tmp_path: Path, step: Step, message: str
) -> None:
    builder = Builder(
        {"one": Stage("one", "debian", (step,))}, repository_root, "*\n!agent\n", tmp_path, [], environment={}
    )
    with pytest.raises(ValueError, match=message):
        builder.build("one")
