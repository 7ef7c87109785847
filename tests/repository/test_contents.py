"""What the repository holds and says: the two commands, the CI contract, no foreign paths, nothing big."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

LARGEST_FILE_BYTES = 2**20
FORBIDDEN = {
    "a path of somebody's machine": re.compile(r"(?<![\w.$}\"')])/(?:work|root|home|Users)/\w"),
    "a package registry's host": re.compile(
        r"pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|deb\.debian\.org|archive\.ubuntu\.com|download\.pytorch\.org"
    ),
    "unfinished work": re.compile(r"\b(?:T[O]DO|F[I]XME|X[X]X)\b"),
}


@pytest.fixture(scope="module")
def files(repository_root: Path) -> list[Path]:
    """Every file that git knows or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=repository_root, capture_output=True, text=True, check=True)
    paths = [repository_root / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def problems(text: str) -> list[str]:
    """Lines with something that must not be there, as `line: what`."""
    return [
        f"{number}: {what}: {line.strip()[:80]}"
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in FORBIDDEN.items()
        if pattern.search(line)
    ]


def test_no_foreign_paths_or_hosts(files: list[Path], repository_root: Path) -> None:
    found = []
    for path in files:
        data = path.read_bytes()
        if b"\0" not in data:
            found += [f"{path.relative_to(repository_root)}:{problem}" for problem in problems(data.decode("utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    "line",
    ["cd " + "/work" + "/main", "see /" + "home/me/x", "index https://" + "pypi" + ".org/simple", "# TO" + "DO later"],
)
def test_a_forbidden_line_is_noticed(line: str) -> None:
    assert len(problems(f"fine\n{line}\n")) == 1


def test_no_file_is_big(files: list[Path]) -> None:
    assert [path.name for path in files if path.stat().st_size > LARGEST_FILE_BYTES] == []


def test_text_files_end_with_one_newline(files: list[Path], repository_root: Path) -> None:
    wrong = []
    for path in files:
        data = path.read_bytes()
        is_text = data and b"\0" not in data and "LICENSE" not in path.as_posix()
        if is_text and (not data.endswith(b"\n") or data.endswith(b"\n\n") or b"\r" in data):
            wrong.append(str(path.relative_to(repository_root)))
    assert wrong == []


def test_readme_opens_with_the_two_commands(repository_root: Path) -> None:
    readme = (repository_root / "README.md").read_text(encoding="utf-8")
    first_block = re.search(r"```\w*\n(.*?)```", readme, re.DOTALL)
    assert first_block is not None
    commands = [line.split("#")[0].strip() for line in first_block[1].splitlines() if line.strip()]
    assert commands == ["make demo", "make test"]
    assert readme[: first_block.start()].count("\n") <= 6


def test_ci_runs_the_tests_and_the_linters(repository_root: Path) -> None:
    ci = repository_root / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    text = ci.read_text(encoding="utf-8")
    assert re.search(r"^[^#\n]*\bmake test\b", text, re.MULTILINE)
    assert re.search(r"^[^#\n]*\bmake lint\b", text, re.MULTILINE)


def test_every_make_target_is_there(repository_root: Path) -> None:
    text = (repository_root / "Makefile").read_text(encoding="utf-8")
    declared = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert declared is not None
    assert {"setup", "demo", "test", "lint", "bench", "clean", "test-fresh"} <= set(declared[1].split())
    for target in declared[1].split():
        subprocess.run(["make", "--dry-run", target], cwd=repository_root, capture_output=True, check=True)


def test_scripts_can_be_run_and_parse(repository_root: Path) -> None:
    for path in sorted((repository_root / "scripts").glob("*.sh")):
        subprocess.run(["sh", "-n", path], check=True)
        assert os.access(path, os.X_OK) == (path.name != "common.sh"), path.name


def test_hooks_are_local(repository_root: Path) -> None:
    text = (repository_root / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"repo: *(\S+)", text)) == {"local"}


def test_traces_are_whole_and_attributed(repository_root: Path) -> None:
    folder = repository_root / "engine_shim" / "traces"
    readme = (folder / "README.md").read_text(encoding="utf-8")
    traces = sorted(folder.glob("*.gz"))
    assert len(traces) == 2
    for path in traces:
        assert path.name in readme
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            rows = sum(1 for _ in lines) - (".csv" in path.name)
        first, last = map(int, path.name.split(".")[0].split("_")[-1].split("-"))
        assert rows == last - first + 1
    for licence in re.findall(r"\((LICENSES/[^)]+)\)", readme):
        assert (folder / licence).is_file()
    with gzip.open(next(path for path in traces if "mooncake" in path.name), "rt", encoding="utf-8") as lines:
        row = json.loads(next(lines))
    assert set(row) == {"arrival_s", "prompt_tokens", "output_tokens", "hash_ids"}
