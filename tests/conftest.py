"""Fixtures for every test, and the rule that a test that was not run is not a test that passed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NO_CHROMIUM = "no Chromium: apt-get install chromium, or name one in KVATLAS_CHROMIUM"

# Of each kind of hostile input, see tests/fuzz; those of the default are the same in each run.
FUZZ_EXAMPLES = int(os.environ.get("KVATLAS_FUZZ_EXAMPLES") or 0)

# How long one example takes says more of the machine than of what is tested. The examples differ from run to run, also
# where Hypothesis finds itself in continuous integration; one that fails is printed so that it can be had again.
settings.register_profile(
    "kvatlas",
    settings.get_profile("default"),
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvatlas")

_not_run: list[tuple[str, str]] = []


def find_chromium() -> str | None:
    """Path of the browser that the tests drive: KVATLAS_CHROMIUM, else the first usual name on PATH."""
    names = (os.environ["KVATLAS_CHROMIUM"],) if os.environ.get("KVATLAS_CHROMIUM") else CHROMIUM_NAMES
    return next((path for path in map(shutil.which, names) if path), None)


@pytest.fixture(scope="session")
def repository_root() -> Path:
    """The checkout under test."""
    return ROOT


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium for Playwright's `executable_path`; without one the test counts as not run."""
    path = find_chromium()
    if path is None:
        pytest.skip(NO_CHROMIUM)
    return path


@pytest.fixture(scope="session")
def prometheus_tools() -> Path:
    """Folder with promtool, prometheus, amtool and alertmanager; fetched into the cache when it is not there."""
    script = ROOT / "scripts" / "prometheus_tools.sh"
    found = subprocess.run([script], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if found.returncode != 0:
        pytest.fail(f"{script.name} found no Prometheus tools: {found.stderr.strip()}", pytrace=False)
    return Path(found.stdout.strip())


@pytest.fixture(scope="session")
def promtool(request: pytest.FixtureRequest) -> Path:
    """Path of promtool: KVATLAS_PROMTOOL, else from `prometheus_tools`."""
    if named := os.environ.get("KVATLAS_PROMTOOL"):
        if not os.access(named, os.X_OK):
            pytest.fail(f"KVATLAS_PROMTOOL={named} cannot be run", pytrace=False)
        return Path(named)
    folder: Path = request.getfixturevalue("prometheus_tools")
    return folder / "promtool"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a browser its tests are skipped before they start servers; the session then fails all the same."""
    if find_chromium() is None:
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(pytest.mark.skip(reason=NO_CHROMIUM))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember each test that was skipped; only a test marked `gpu` may be."""
    if report.skipped and not hasattr(report, "wasxfail") and "gpu" not in report.keywords:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _not_run.append((report.nodeid, reason.removeprefix("Skipped: ")))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that passed but left tests out."""
    if _not_run and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that were not run, and why."""
    if _not_run:
        terminalreporter.section("not run: these tests count as failed", red=True)
        for nodeid, reason in _not_run:
            terminalreporter.line(f"{nodeid}: {reason}")
