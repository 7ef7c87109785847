"""Whatever the README claims names a test or a benchmark that is there, and its figures are those of their sources."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agent.history.tiers import DAY, FRAME_TIERS, SAMPLE_TIERS

FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
EVIDENCE = re.compile(r"(?<![\w/.])((?:tests|benchmarks)/[\w./-]*\w|scripts/test_\w+\.sh)/?(?:(?:::|#)(\w+))?")

FIGURES = [
    ("3.8 GB the first time", "docs/vllm.md", "3.8 GB"),
    ("about 0.4 GB with a CPU build of PyTorch", "scripts/setup.sh", "about 0.4 GB with a CPU build of PyTorch"),
    ("3 GB or more", "scripts/setup.sh", "or 3 GB where pip picks the build of PyTorch with CUDA"),
    ("about 3.5 GB", "scripts/vllm_env.sh", "about 3.5 GB"),
    ("6,000 MiB must be free", "scripts/vllm_env.sh", "FREE_MIB_NEEDED=6000"),
    ("for up to 30 days", "docs/history.md", "1 min for 30 days"),
    ("Python 3.11 or newer", "pyproject.toml", 'requires-python = ">=3.11"'),
    ("vLLM 0.32", "docs/compatibility.md", "| vLLM | 0.32 |"),
    ("Transformers 5.19", "docs/compatibility.md", "| Transformers | 5.19,"),
]


@pytest.fixture(scope="module")
def readme(repository_root: Path) -> str:
    return (repository_root / "README.md").read_text(encoding="utf-8")


def sections(text: str) -> dict[str, str]:
    """The page by its headings of the second level; what stands above them has the name of the page."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in FENCE.sub("", text).splitlines():
        if match := re.fullmatch(r"##? (.+)", line):
            heading = match[1]
        found.setdefault(heading, []).append(line)
    return {heading: "\n".join(lines) for heading, lines in found.items()}


def defined(path: Path) -> set[str]:
    """Tests of a module by name: functions, and what a state machine is collected as."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.startswith(("test_", "Test"))}


def fault(root: Path, place: str, name: str) -> str:
    """What is wrong with a piece of evidence; "" where nothing is."""
    path = root / place
    if not path.exists():
        return f"{place} is not there"
    if path.is_dir():
        return "" if any(path.rglob("test_*.py")) else f"{place} holds no test"
    if place.startswith("tests/") and not re.fullmatch(r"test_\w+\.py", path.name):
        return f"{place} is no test"
    if name and (path.suffix != ".py" or name not in defined(path)):
        return f"{place} has no test {name}"
    return ""


def problems(text: str, root: Path) -> list[str]:
    """Evidence that is none, and sections without any."""
    found = []
    for heading, body in sections(text).items():
        evidence = EVIDENCE.findall(body)
        found += [said for place, name in evidence if (said := fault(root, place, name))]
        if not evidence:
            found.append(f"nothing shows what stands under {heading!r}")
    return found


def test_every_claim_names_what_shows_it(readme: str, repository_root: Path) -> None:
    assert len(sections(readme)) > 5
    assert problems(readme, repository_root) == []


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        ("[test_setup](tests/repository/test_setup.py)", ""),
        ("`benchmarks/map_reader.py` and tests/fuzz", ""),
        ("[test_flight](tests/agent/test_flight.py)", "tests/agent/test_flight.py is not there"),
        ("`benchmarks/flight.py`", "benchmarks/flight.py is not there"),
        ("`scripts/test_flight.sh`", "scripts/test_flight.sh is not there"),
        ("`tests/__pycache__/nothing/`", "tests/__pycache__/nothing is not there"),
        ("`tests/conftest.py`", "tests/conftest.py is no test"),
        ("`tests/repository/test_setup.py::test_it_flies`", "tests/repository/test_setup.py has no test test_it_flies"),
        (
            "[test_setup](tests/repository/test_setup.py#set_up)",
            "tests/repository/test_setup.py has no test set_up",
        ),
        ("", "nothing shows what stands under 'Flight'"),
        ("```sh\npytest tests/fuzz\n```", "nothing shows what stands under 'Flight'"),
    ],
)
def test_a_claim_without_evidence_is_noticed(repository_root: Path, evidence: str, said: str) -> None:
    above = "# Product\n\nIt runs ([test_docs](tests/repository/test_docs.py)).\n\n"
    text = f"{above}## Flight\n\nIt flies.\n\n{evidence}\n"
    assert problems(text, repository_root) == ([said] if said else [])


def test_a_folder_without_tests_shows_nothing(tmp_path: Path) -> None:
    (tmp_path / "tests" / "flight").mkdir(parents=True)
    assert problems("# Product\n\nIt flies (tests/flight).\n", tmp_path) == ["tests/flight holds no test"]


@pytest.mark.parametrize(("said", "source", "there"), FIGURES, ids=[figure[0] for figure in FIGURES])
def test_figures_are_those_of_their_sources(
    readme: str, repository_root: Path, said: str, source: str, there: str
) -> None:
    assert said in re.sub(r"\s+", " ", readme)
    assert there in (repository_root / source).read_text(encoding="utf-8")


def test_the_past_goes_as_far_back_as_is_said() -> None:
    assert SAMPLE_TIERS[-1].keep_seconds == FRAME_TIERS[-1].keep_seconds == 30 * DAY


@pytest.mark.parametrize("left_out", [True, False])
def test_engines_are_left_out_only_where_that_is_asked_for_and_then_loudly(
    repository_root: Path, left_out: bool
) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/engines/vllm"]
    environment = {**os.environ, "KVATLAS_TEST_ENGINES": "0" if left_out else ""}
    told = subprocess.run(
        command, cwd=repository_root, env=environment, capture_output=True, text=True, check=False
    ).stdout
    assert ("tests/engines/vllm/test_vllm.py::" in told) is not left_out
    assert ("KVATLAS_TEST_ENGINES=0: tests against real engines were left out" in told) is left_out


def planned(repository_root: Path, *arguments: str) -> str:
    command = ["make", "--dry-run", *arguments]
    return subprocess.run(command, cwd=repository_root, capture_output=True, text=True, check=True).stdout


def test_settings_of_make_reach_their_commands(repository_root: Path) -> None:
    assert re.search(r'/elsewhere"/bin/kvatlas demo --seconds 60$', planned(
        repository_root, "demo", "ARGS=--seconds 60", "VENV=/elsewhere"), re.MULTILINE)  # fmt: skip
    assert "scripts/test.sh -k map -x" in planned(repository_root, "test", "ARGS=-k map -x")
    built = re.findall(r"-m build .*--outdir dist (\S+)$", planned(repository_root, "wheels"), re.MULTILINE)
    assert built == [".", "deploy/shim"]


def test_every_page_is_listed(repository_root: Path) -> None:
    listed = re.findall(r"\(([\w-]+\.md)\)", (repository_root / "docs" / "README.md").read_text(encoding="utf-8"))
    assert set(listed) == {path.name for path in (repository_root / "docs").glob("*.md")} - {"README.md"}


def unshown_answers(text: str, root: Path) -> list[str]:
    """Threats of the security page whose last column names no test that is there."""
    _, _, table = text.partition("| threat | answer | shown by |\n")
    rows = [line.strip("|").split(" | ") for line in table.partition("\n\n")[0].splitlines()[1:]]
    found = []
    names: list[str] = []
    for row in rows:
        if not row[-1].strip().startswith("the same"):  # as in the row above
            names = re.findall(r"`([^`]+)`", row[-1])
        there = [(root / name).exists() or any((root / "tests").rglob(name)) for name in names]
        if not there or not all(there):
            found.append(row[0].strip())
    return found if rows else ["no table"]


def test_every_answer_to_a_threat_names_a_test(repository_root: Path) -> None:
    text = (repository_root / "docs" / "security.md").read_text(encoding="utf-8")
    assert unshown_answers(text, repository_root) == []
    assert unshown_answers(text.replace("`tests/fuzz`", "`tests/flight`"), repository_root) == [
        "A damaged or hostile map, message, scrape, snapshot, trace, rules or settings file takes the agent down"
    ]
    assert unshown_answers("# Security\n", repository_root) == ["no table"]
