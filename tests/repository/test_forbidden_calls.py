"""The packages load no pickle, evaluate no text and start no shell; what looks like it is named, with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = ("engine_shim", "agent", "alerts", "dashboard")
MODULES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"})
NAMES = frozenset({"eval", "exec", "compile", "__import__"})
ATTRIBUTES = frozenset(
    {"os.system", "os.popen", "os.execl", "os.spawnl", "subprocess.getoutput", "subprocess.getstatusoutput"}
)
ALLOWED = {
    # Reads pickles of plain values by a machine of its own: of pickletools it takes the names of the opcodes.
    "agent/allocator/plain_pickle.py": {"import pickletools"},
}


def forbidden(source: str) -> Iterator[str]:
    """What a module does that it may not, one text each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (
                f"import {one.name}" for one in node.names if one.name.split(".")[0] in MODULES | {"pickletools"}
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES | {"pickletools"}:
            yield f"import {node.module}"
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    if called in NAMES | ATTRIBUTES:
        yield called
    named = {one.arg: one.value for one in node.keywords if one.arg}
    shell = named.get("shell")
    if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
        yield "shell=True"
    if called.endswith("yaml.load") or called in ("yaml.unsafe_load", "yaml.full_load"):
        yield called
    if called == "torch.load" and ast.unparse(named.get("weights_only", ast.Constant(None))) != "True":
        yield "torch.load without weights_only=True"
    pickled = named.get("allow_pickle")
    if pickled is not None and not (isinstance(pickled, ast.Constant) and pickled.value is False):
        yield "allow_pickle=True"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_does_what_it_may_not(repository_root: Path, package: str) -> None:
    files = sorted((repository_root / package).rglob("*.py"))
    assert files
    found = {
        str(path.relative_to(repository_root)): done
        for path in files
        if (done := set(forbidden(path.read_text(encoding="utf-8"))))
    }
    assert {
        name: done - ALLOWED.get(name, set()) for name, done in found.items() if done - ALLOWED.get(name, set())
    } == {}


def test_what_is_allowed_is_still_there(repository_root: Path) -> None:
    for name, allowed in ALLOWED.items():
        assert allowed <= set(forbidden((repository_root / name).read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import pickletools",
        "def late():\n    import marshal",
        "eval('1')",
        "exec(text)",
        "os.system('ls')",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=wanted)",
        "yaml.load(text)",
        "yaml.unsafe_load(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_a_forbidden_call_is_noticed(source: str) -> None:
    assert list(forbidden(source))


@pytest.mark.parametrize(
    "source",
    [
        "subprocess.run(['ls'], shell=False)",
        "yaml.safe_load(text)",
        "torch.load(path, weights_only=True)",
        "re.compile('a')",
    ],
)
def test_what_is_right_is_let_be(source: str) -> None:
    assert not list(forbidden(source))
