"""Imports point one way: engine_shim <- agent <- dashboard; alerts stands alone; torch is for the reference engine."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

OURS = ("engine_shim", "agent", "alerts", "dashboard")
ENGINES = ("vllm", "transformers", "sglang")  # each only in the adapter of its name


@dataclass(frozen=True)
class Import:
    """One imported module, as a dotted name, and where it is imported."""

    module: str
    line: int

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    def within(self, *packages: str) -> bool:
        return any(self.module == package or self.module.startswith(package + ".") for package in packages)


def imports_of(source: str) -> Iterator[Import]:
    """Every import statement, inside functions too; `from a import b` counts as a.b, since b may be a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(f"{'.' * node.level}{node.module or ''}.{alias.name}", node.lineno)


def allowed(path: Path, found: Import) -> bool:
    """The rules. `path` is relative to the repository root."""
    package = path.parts[0]
    if found.module.startswith("."):
        return False  # a relative import would hide where it points
    if package == "engine_shim":
        if path.as_posix() == "engine_shim/launcher.py" and found.within("agent.cli"):
            return True  # the entry point hands over to the agent's commands where those are installed
        if found.top == "torch" or found.within("engine_shim.reference"):
            return path.parts[1] == "reference"
        if found.top in ENGINES:
            return path.as_posix().startswith(f"engine_shim/adapters/{found.top}")
        if found.top == "numba":  # which vLLM brings along
            return path.as_posix() == "engine_shim/adapters/vllm/compiled.py"
        return found.top in sys.stdlib_module_names or found.top in ("numpy", "engine_shim")
    if package == "agent":
        return found.top not in ("torch", "dashboard") and not found.within(
            "engine_shim.reference", "engine_shim.adapters"
        )
    if package == "dashboard":
        wire = found.module.startswith("agent.wire")  # agent.wire and its parts, such as agent.wire.alerts
        return found.top not in (*OURS, "torch") or wire or found.within("dashboard", "agent.client")
    return found.top not in (*OURS, "torch") or found.top == "alerts"


@pytest.mark.parametrize("package", OURS)
def test_imports_point_inwards(repository_root: Path, package: str) -> None:
    files = sorted((repository_root / package).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(repository_root)}:{found.line} imports {found.module}"
        for path in files
        for found in imports_of(path.read_text(encoding="utf-8"))
        if not allowed(path.relative_to(repository_root), found)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("engine_shim/pool/block_pool.py", "import torch"),
        ("engine_shim/pool/block_pool.py", "import psutil"),
        ("engine_shim/pool/block_pool.py", "def late():\n    from agent import wire"),
        ("engine_shim/pool/block_pool.py", "from engine_shim import reference"),
        ("engine_shim/pool/block_pool.py", "from . import layout"),
        ("engine_shim/pool/block_pool.py", "import vllm"),
        ("engine_shim/adapters/sglang/plugin.py", "from vllm.v1.core import block_pool"),
        ("engine_shim/adapters/launch.py", "import transformers"),
        ("engine_shim/reference/engine.py", "import agent.wire"),
        ("agent/sampling/sampler.py", "import torch.cuda"),
        ("agent/sampling/sampler.py", "from engine_shim.reference import engine"),
        ("agent/sampling/sampler.py", "import engine_shim.adapters.vllm"),
        ("agent/sampling/sampler.py", "from dashboard import app"),
        ("dashboard/app.py", "from engine_shim.snapshot import BlockState"),
        ("dashboard/app.py", "from agent import sampler"),
        ("alerts/rules.py", "from agent.wire import EngineSummary"),
    ],
)
def test_a_wrong_import_is_noticed(path: str, source: str) -> None:
    (found,) = imports_of(source)
    assert not allowed(Path(path), found)


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("engine_shim", ("torch", "agent", "pydantic", "fastapi")),
        ("engine_shim.adapters.vllm", ("torch", "vllm", "agent", "pydantic")),
        ("engine_shim.adapters.transformers", ("torch", "transformers", "agent", "pydantic")),
        ("agent.wire", ("torch", "streamlit", "engine_shim")),
    ],
)
def test_importing_loads_no_more_than_it_may(package: str, absent: tuple[str, ...]) -> None:
    """Also what is imported indirectly: in a process of its own, since this one has loaded everything."""
    program = f"import sys, {package}; print(*sorted(set({absent!r}) & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []
