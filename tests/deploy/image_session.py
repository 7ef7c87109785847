"""Builds the images of deploy/docker and runs them as a pod does. For root, in a mount namespace of its own:

    unshare --mount --propagation private python image_session.py REPOSITORY WORK BARE_ROOT SETTINGS [FOLDER...]

SETTINGS is a folder that is laid over the bare root, the last ones are folders that pip's settings name. One JSON
object on standard output says what was seen; test_images.py judges it. The containers have a network and IPC of their
own, and each a namespace of processes, a root file system that cannot be written, no capability, and a user without a
name.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.deploy.dockerfile import Builder, Image, parse

GROUP = 10001  # fsGroup
ENGINE_USER = 2000
PATIENCE_SECONDS = 300.0
PASSED_ON = ("PIP_", "SSL_CERT_", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "http", "HTTP", "no_proxy", "NO_PROXY")
DEVICES = ("null", "zero", "full", "random", "urandom")
CONFINED = ("--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs")
SHIM = "/opt/kvatlas-shim"
ENGINE = """
import time
import engine_shim
from engine_shim import MapObserver, MapSpec
assert engine_shim.__file__.startswith("/opt/kvatlas-shim/"), engine_shim.__file__
spec = MapSpec(engine_id="pod-7", kind="mine", model="org/model", pool="kv", total_blocks=20_000, block_tokens=16,
               block_bytes=65_536, dtype="float16", medium="cuda")
observer = MapObserver.create(spec)
while True:
    observer.step_ended(running=0, waiting=0)
    time.sleep(0.2)
"""


class Container:
    """An image's root: its layers, read-only, with volumes over them as a container runtime mounts them."""

    def __init__(self, image: Image, work: Path, name: str, volumes: dict[str, tuple[Path, bool]]) -> None:
        """`volumes` are paths in the container, each with a folder and whether it is read-only there."""
        self.image, self.root = image, work / f"root-{name}"
        points = work / f"points-{name}"
        for path in ("proc", "dev", *(one.lstrip("/") for one in volumes)):
            (points / path).mkdir(parents=True, exist_ok=True)
        self.root.mkdir()
        mount("-t", "overlay", "overlay", "-o", f"lowerdir={':'.join(map(str, (points, *image.layers)))}", self.root)
        mount("-t", "tmpfs", "-o", "mode=755,size=1m", "tmpfs", self.root / "dev")
        for device in DEVICES:
            (self.root / "dev" / device).touch()
            mount("--bind", f"/dev/{device}", self.root / "dev" / device)
        (self.root / "dev" / "shm").mkdir()
        mount("-t", "tmpfs", "-o", "mode=1777,size=64m", "tmpfs", self.root / "dev" / "shm")
        for path, (folder, read_only) in volumes.items():
            mount("--bind", folder, self.root / path.lstrip("/"))
            if read_only:
                mount("-o", "remount,bind,ro", self.root / path.lstrip("/"))

    def argv(
        self, *command: str, user: int = GROUP, environment: Mapping[str, str] = MappingProxyType({})
    ) -> list[str]:
        """A command in this root, confined: the group of the volumes is a further one, as a kubelet gives it."""
        variables = {**self.image.environment, **environment}
        named = ["--reuid", str(user), "--regid", str(user), "--groups", str(GROUP)]
        given = [f"{key}={value}" for key, value in variables.items()]
        return ["chroot", str(self.root), "setpriv", *named, *CONFINED, "--", "env", "-i", *given, *command]

    @contextmanager
    def run(self, *argv: str) -> Iterator[Running]:
        """A process, the first of a namespace of processes; killed in the end."""
        command = [*self._apart(), *argv]
        started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        running = Running(self, started)
        try:
            yield running
        finally:
            # The first process of a namespace takes all others with it. unshare's own --kill-child does not reach a
            # process that has changed its user since.
            with suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGKILL)
            started.communicate()

    def run_once(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """The same for a process that ends by itself."""
        return subprocess.run([*self._apart(), *argv], capture_output=True, text=True, check=False)

    def _apart(self) -> list[str]:
        script = f'mount -t proc proc "{self.root / "proc"}"; exec "$@"'
        return ["unshare", "--pid", "--fork", "sh", "-c", script, "sh"]


class Running:
    """A container that runs."""

    def __init__(self, container: Container, process: subprocess.Popen[str]) -> None:
        self.container, self.process = container, process
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        self.pid = int(until(lambda: children.read_text().split(), "the container's process")[0])

    def execute(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Another command in it, as kubectl exec and probes do."""
        inside = ["nsenter", "--target", str(self.pid), "--pid", *argv]
        return subprocess.run(inside, capture_output=True, text=True, check=False)

    def wait_until_healthy(self) -> None:
        """Until the image's own health check says so. Raises RuntimeError where it ends before."""
        check = self.container.argv(*self.container.image.health)

        def healthy() -> bool:
            if self.process.poll() is not None:
                said = self.process.communicate()[0]
                raise RuntimeError(f"{self.container.root.name} ended with {self.process.returncode}: {said[-3000:]}")
            return self.execute(*check).returncode == 0

        until(healthy, f"health of {self.container.root.name}")

    def status(self) -> dict[str, str]:
        """What the kernel says of the image's process."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        return {name: fields[name].strip() for name in ("Uid", "Gid", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs")}

    def writable(self, *paths: str) -> list[str]:
        """Those of the paths at which its user can make a file."""
        return [path for path in paths if self.execute(*self.container.argv("touch", path)).returncode == 0]

    def resident_mib(self) -> float:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return round(next(int(one.split()[1]) for one in lines if one.startswith("VmRSS")) / 1024, 1)

    def end(self) -> int:
        """SIGTERM, as a kubelet sends it; the exit status."""
        os.kill(self.pid, signal.SIGTERM)
        self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


def volume(work: Path, name: str) -> Path:
    """An emptyDir in memory in a pod with an fsGroup: of that group, which what is made in it inherits."""
    folder = work / f"volume-{name}"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"mode=2777,gid={GROUP},size=64m", "tmpfs", folder)
    return folder


def loopback_up() -> None:
    """In a new network namespace that device is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS, IFF_UP, IFF_RUNNING


def until(ask: Callable[[], Any], what: str) -> Any:
    """The first true answer; fails after a long time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            if answer := ask():
                return answer
        time.sleep(0.1)
    raise TimeoutError(f"{what} did not come in {PATIENCE_SECONDS:g} s")


def fetch(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and text, as another container of the pod would get them."""
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", method=method, data=b"{}" if method == "POST" else None
    )
    try:
        with urllib.request.urlopen(asked, timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def pod(images: dict[str, Image], work: Path) -> dict[str, Any]:
    """The pod of deploy/kubernetes/overlays/vllm with a small engine, and the dashboard beside it."""
    loopback_up()
    maps, shim, state = (volume(work, name) for name in ("maps", "shim", "state"))
    temporary = {name: volume(work, f"tmp-{name}") for name in ("agent", "dashboard")}
    layer = Container(images["shim"], work, "shim", {SHIM: (shim, False)})
    laid = layer.run_once(*layer.argv(*layer.image.entrypoint, *layer.image.command))
    seen: dict[str, Any] = {"shim": {"exit": laid.returncode, "said": laid.stdout + laid.stderr}}
    seen["shim"]["files"] = sorted(path.name for path in shim.iterdir())
    agent = Container(
        images["agent"],
        work,
        "agent",
        {"/run/kvatlas": (maps, True), "/var/lib/kvatlas": (state, False), "/tmp": (temporary["agent"], False)},
    )
    engine = Container(images["agent"], work, "engine", {"/run/kvatlas": (maps, False), SHIM: (shim, True)})
    settings = {"KVATLAS_DIR": "/run/kvatlas", "KVATLAS_STATE_DIR": "/var/lib/kvatlas", "KVATLAS_STATE_MAX_MIB": "32"}
    runs = engine.argv(
        "python3", "-c", ENGINE, user=ENGINE_USER, environment={"PYTHONPATH": SHIM, "KVATLAS_DIR": "/run/kvatlas"}
    )
    serves = agent.argv(*agent.image.entrypoint, *agent.image.command, environment=settings)
    with agent.run(*serves) as sidecar:
        sidecar.wait_until_healthy()
        with engine.run(*runs) as beside:

            def live() -> bool:
                if beside.process.poll() is not None:
                    raise RuntimeError(f"the engine ended: {beside.process.communicate()[0]}")
                found = json.loads(fetch(9477, "/v1/engines")[1])["engines"]
                return [one["state"] for one in found] == ["live"]

            until(live, "a live engine")
            doctor = sidecar.execute(*agent.argv(*agent.image.entrypoint, "doctor", "--json", environment=settings))
            seen["agent"] = {
                "status": sidecar.status(),
                "writable": sidecar.writable("/x", "/opt/kvatlas/x", "/etc/x", "/run/kvatlas/x"),
                "writable_where_wanted": sidecar.writable("/tmp/x", "/var/lib/kvatlas/x"),
                "doctor": json.loads(doctor.stdout) if doctor.stdout else doctor.stderr,
                "change": fetch(9477, "/v1/mutes", "POST")[0],
                "metrics": fetch(9477, "/metrics")[1],
                "resident_mib": sidecar.resident_mib(),
                "engine_user": Path(f"/proc/{beside.pid}/status").read_text().partition("Uid:")[2].split()[0],
            }
        until(lambda: list(state.glob("blackbox/*.tar.gz")), "a black box of the engine")
        seen["agent"]["exit"] = sidecar.end()
    page = Container(images["dashboard"], work, "dashboard", {"/tmp": (temporary["dashboard"], False)})
    opens = page.argv(
        *page.image.entrypoint, *page.image.command, environment={"KVATLAS_AGENT_URL": "http://127.0.0.1:9477"}
    )
    with page.run(*opens) as shown:
        shown.wait_until_healthy()
        seen["dashboard"] = {
            "status": shown.status(),
            "writable": shown.writable("/x", "/opt/kvatlas/x", "/etc/x"),
            "page": fetch(8501, "/"),
            "resident_mib": shown.resident_mib(),
        }
    return seen


def build(
    repository: Path, work: Path, bare: list[Path], folders: list[Path]
) -> tuple[dict[str, Image], dict[str, float]]:
    """Every image that runs, and the seconds that each took."""
    docker = repository / "deploy" / "docker"
    builder = Builder(
        parse((docker / "Dockerfile").read_text(encoding="utf-8")),
        repository,
        (docker / "Dockerfile.dockerignore").read_text(encoding="utf-8"),
        work,
        bare,
        mounts=folders,
        environment={name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)},
    )
    images, seconds = {}, {}
    for name in ("shim", "agent", "dashboard"):
        began = time.monotonic()
        images[name] = builder.build(name)
        seconds[name] = round(time.monotonic() - began, 1)
    return images, seconds


def main() -> int:
    if sys.argv[1] == "--pod":
        work = Path(sys.argv[2])
        described = json.loads((work / "images.json").read_text())
        images = {
            name: Image(**{**one, "layers": [Path(layer) for layer in one["layers"]]})
            for name, one in described.items()
        }
        print(json.dumps(pod(images, work)))
        return 0
    repository, work, bare, settings, *folders = map(Path, sys.argv[1:])
    mount("-t", "tmpfs", "-o", "mode=755,size=6g", "tmpfs", work)
    images, seconds = build(repository, work, [settings, bare], folders)
    described = {name: dataclasses.asdict(one) for name, one in images.items()}
    (work / "images.json").write_text(json.dumps(described, default=str))
    inside = ["unshare", "--net", "--ipc", sys.executable, __file__, "--pod", str(work)]
    ran = subprocess.run(inside, stdout=subprocess.PIPE, text=True, check=True)
    users = {name: one.user for name, one in images.items()}
    print(json.dumps({"seconds": seconds, "users": users, **json.loads(ran.stdout)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
