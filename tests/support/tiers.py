"""Selection of tests and their time budget: markers, ``--effort``, ``--proof``, ``--has`` and the time budget.

tests/README.md has the tiers. This module needs pytest alone: tests/gpu runs on machines with little else.
"""

from __future__ import annotations

import datetime
import itertools
import os
import statistics
import time
import tomllib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

TESTS = Path(__file__).parents[1]
BUDGET_SECONDS = 2.0
"""Time that set-up and call of a test without a marker may take on an idle machine as fast as the one below."""
REFERENCE_SECONDS = 0.015
"""Time of the reference work on a fast machine of 2026, which decides how fast this one is."""
QUARANTINE_DAYS = 14
EVERYTHING = "everything"
MARKER_OF_FOLDER = {
    "api_server": "cluster",
    "faults": "slow",
    "gpu": "gpu",
    "lossless": "slow",
    "processes": "slow",
    "serving": "slow",
}
FREE_OF_BUDGET = frozenset(("slow", "proof", "cluster", "gpu", "core"))
MARKERS = (
    "slow: takes over two seconds; part of `make test-all`",
    "proof(name): takes minutes and runs with `make proofs P=name` only",
    "cluster: needs a Kubernetes API server; added to every test that uses the fixture `cluster`",
    "gpu: needs a GPU; added to every test in tests/gpu",
    "core: takes over two seconds and is part of `make test` all the same",
)
T = TypeVar("T")
Effort = Literal["quick", "full", "nightly"]
_effort: Effort = "full"


def by_effort(*, quick: T, full: T, nightly: T) -> T:
    """Return the size of a test for the effort of this run."""
    return {"quick": quick, "full": full, "nightly": nightly}[_effort]


def covering(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return cases of one value of each choice: in nightly runs all, else so many that every pair of values occurs."""
    product = list(itertools.product(*(range(len(values)) for values in choices)))
    if _effort != "nightly":
        pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in product}
        missing, product = set[Any]().union(*pairs.values()), []
        while missing:
            best = max(pairs, key=lambda case: len(pairs[case] & missing))
            product.append(best)
            missing -= pairs.pop(best)
    return [tuple(values[at] for values, at in zip(choices, case, strict=True)) for case in sorted(product)]


def skip_reason(thing: str, why: str) -> str:
    """Return the reason for skipping a test where the machine lacks a thing, in the form that ``--has`` reads."""
    return f"needs {thing}: {why}"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers of tests (tests/README.md)")
    group.addoption(
        "--effort",
        choices=("quick", "full", "nightly"),
        default="full",
        help="quick: tests without a marker and core ones; full: all but the proofs; nightly: full with more cases",
    )
    group.addoption("--proof", default="", help="run only the proofs with these names, separated by commas; or all")
    group.addoption(
        "--has",
        default="",
        help=f"what this machine has, or {EVERYTHING}: a test that is skipped for want of it fails",
    )
    group.addoption("--second-try", action="store_true", help="tests that pass now count as flaky: they had failed")


def pytest_configure(config: pytest.Config) -> None:
    choose_effort(config.getoption("--effort"))
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    config.pluginmanager.register(_Skips(_names(config.getoption("--has"))), "skips")
    if config.getoption("--second-try"):
        config.pluginmanager.register(_SecondTry(), "second-try")


def choose_effort(effort: Effort) -> None:
    """Set the effort of this process. Properties have the same examples in every run but a nightly one."""
    global _effort
    _effort = effort
    try:
        from hypothesis import settings
    except ImportError:  # a machine that tests the kernels alone
        return
    settings.register_profile("quick", deadline=None, max_examples=40, derandomize=True)
    settings.register_profile("full", deadline=None, max_examples=40, derandomize=True)
    settings.register_profile("nightly", deadline=None, max_examples=400, print_blob=True)
    settings.load_profile(_effort)


def _names(text: str) -> frozenset[str]:
    return frozenset(filter(None, text.split(",")))


# Selection


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by fixture and folder, and deselect those of other tiers."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("cluster")
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if folder in MARKER_OF_FOLDER:
            item.add_marker(MARKER_OF_FOLDER[folder])
    named = _names(config.getoption("--proof"))
    if unknown := named - {"all"} - {name for item in items for name in _proofs(item)}:
        raise pytest.UsageError(f"no test that was collected is a proof of {', '.join(sorted(unknown))}")
    chosen = [item for item in items if _is_chosen(item, config.getoption("--effort"), named)]
    if len(chosen) < len(items):
        left = set(map(id, chosen))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in left])
        items[:] = chosen


def _is_chosen(item: pytest.Item, effort: Effort, named: frozenset[str]) -> bool:
    proofs = _proofs(item)
    if named:
        return bool(proofs) if "all" in named else bool(proofs & named)
    if proofs:
        return False
    marks = {mark.name for mark in item.iter_markers()}
    return effort != "quick" or "core" in marks or not marks & FREE_OF_BUDGET


def _proofs(item: pytest.Item) -> set[str]:
    return {mark.args[0] for mark in item.iter_markers("proof")}


# Budget


_setup_seconds = pytest.StashKey[float]()
_starved_before = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    item.stash[_starved_before] = starved_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, pytest.TestReport]:
    """Fail a test without a marker that passed, but took longer than the budget."""
    report: pytest.TestReport = yield
    if call.when == "setup":
        item.stash[_setup_seconds] = call.duration
    if call.when == "call" and report.passed and not FREE_OF_BUDGET & {mark.name for mark in item.iter_markers()}:
        starved = starved_seconds() - item.stash[_starved_before]
        seconds = item.stash[_setup_seconds] + call.duration - starved
        if seconds > BUDGET_SECONDS and _effort != "nightly" and seconds > (allowed := budget_seconds()):
            report.outcome = "failed"
            report.longrepr = (
                f"set-up and call took {seconds:.1f} s, and a test without a marker may take {allowed:.1f} s on this "
                "machine at its load: make it faster, or mark it slow"
            )
    return report


def budget_seconds() -> float:
    """Return the budget on this machine at its present load. A fresh clone, as in CI, compiles what it imports."""
    return BUDGET_SECONDS * slowness() * crowding() * (3 if os.environ.get("CI") else 1)


def slowness() -> float:
    """Return how many times longer work takes on this processor than on the one of the budget, at least one."""
    return max(1.0, statistics.median(map(_reference_seconds, range(5))) / REFERENCE_SECONDS)


def _reference_seconds(_: int) -> float:
    began, squares = time.perf_counter(), dict[int, int]()
    for number in range(300_000):
        squares[number & 1023] = number * number % 7
    return time.perf_counter() - began


def crowding() -> float:
    """Return how many times longer work takes because others use the machine: processes by processor, at least one."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def starved_seconds(task: str = "self") -> float:
    """Return for how long a process, or a thread PID/task/TID, was ready to run but had no processor."""
    try:
        return int(Path(f"/proc/{task}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # not every kernel counts
        return 0.0


# Skips


class _Skips:
    """Fails tests that are skipped for want of a thing that the machine has."""

    def __init__(self, has: frozenset[str]) -> None:
        self._has = has

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, pytest.TestReport]:
        report: pytest.TestReport = yield
        if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
            reason = str(report.longrepr[2])
            if self._is_had(reason):
                report.outcome = "failed"
                report.longrepr = f"{reason}. This was not to be skipped here: --has {','.join(sorted(self._has))}"
        return report

    def _is_had(self, reason: str) -> bool:
        if EVERYTHING in self._has:
            return True
        thing = reason.removeprefix("Skipped: ").removeprefix("needs ").partition(":")[0]
        return thing in self._has


# Second tries


class _SecondTry:
    """Counts tests that pass when they are run again as flaky. Only those in the quarantine do not fail the run."""

    def __init__(self) -> None:
        self._flaky: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._flaky.append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid in self._flaky:
            fate = "in quarantine" if is_quarantined(nodeid) else f"mend it, or list it in {QUARANTINE.name}"
            terminalreporter.write_line(f"FLAKY {nodeid} passed only the second time: {fate}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not all(map(is_quarantined, self._flaky)) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


QUARANTINE = TESTS / "quarantine.toml"


def is_quarantined(nodeid: str) -> bool:
    """Return whether a test, or its file or folder, may pass only the second time for now."""
    entries = tomllib.loads(QUARANTINE.read_text()).get("flaky", [])
    return any(
        nodeid == entry["test"] or nodeid.startswith((entry["test"] + "::", entry["test"] + "/")) for entry in entries
    )


def overdue(entries: Sequence[dict[str, Any]], today: datetime.date) -> list[str]:
    """Return the quarantined tests whose time is up."""
    limit = datetime.timedelta(days=QUARANTINE_DAYS)
    return [entry["test"] for entry in entries if today - entry["since"] > limit]
