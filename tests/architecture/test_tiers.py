"""The rules by which tests are chosen, timed and skipped (tests/support/tiers.py), in runs of pytest of their own."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterator

import pytest

from support import tiers

SUITE = """
import pytest, time
def test_plain(): pass
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.core
def test_core(): pass
@pytest.mark.proof("router")
def test_router(): pass
@pytest.mark.proof("loop")
def test_loop(): pass
@pytest.fixture
def cluster(): return "up"
@pytest.fixture
def namespace(cluster): return cluster
def test_on_cluster(namespace): pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.Pytester]:
    """Yield a folder whose tests are under the rules, without other plugins."""
    effort = tiers.by_effort(quick="quick", full="full", nightly="nightly")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest('pytest_plugins = ["support.tiers"]')
    yield pytester
    tiers.choose_effort(effort)


def passed(suite: pytest.Pytester, *options: str) -> set[str]:
    result = suite.runpytest_inprocess("-v", *options)
    return {line.split("::")[1].split()[0] for line in result.outlines if " PASSED" in line}


@pytest.mark.parametrize(
    ("options", "names"),
    {
        "quick": (["--effort=quick"], {"plain", "core"}),
        "full": ([], {"plain", "core", "slow", "on_cluster"}),
        "nightly": (["--effort=nightly"], {"plain", "core", "slow", "on_cluster"}),
        "one proof": (["--proof=router"], {"router"}),
        "two proofs": (["--proof=router,loop"], {"router", "loop"}),
        "all proofs": (["--proof=all"], {"router", "loop"}),
        "without the cluster": (["-m", "not cluster"], {"plain", "core", "slow"}),
    }.values(),
)
def test_tests_are_chosen_by_effort_and_proof(suite: pytest.Pytester, options: list[str], names: set[str]) -> None:
    suite.makepyfile(SUITE)
    assert passed(suite, *options) == {f"test_{name}" for name in names}


def test_a_misspelled_proof_is_an_error(suite: pytest.Pytester) -> None:
    suite.makepyfile(SUITE)
    result = suite.runpytest_inprocess("--proof=rooter")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*no test that was collected is a proof of rooter"])


def test_only_tests_without_a_marker_have_a_budget(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "BUDGET_SECONDS", 0.01)
    monkeypatch.setattr(tiers, "budget_seconds", lambda: 0.01)
    suite.makepyfile(SUITE.replace("pass", "time.sleep(0.02)").replace('return "up"', "time.sleep(0.02)"))
    result = suite.runpytest_inprocess()
    result.assert_outcomes(passed=3, failed=1, deselected=2)
    result.stdout.fnmatch_lines(["*test_plain*", "*mark it slow"])
    suite.runpytest_inprocess("--effort=nightly").assert_outcomes(passed=4, deselected=2)


def test_budget_grows_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(tiers, "slowness", lambda: 1.0)
    monkeypatch.setattr(tiers.os, "sched_getaffinity", lambda _: {0, 1})
    for load, seconds in ((0.3, 2.0), (2.0, 2.0), (5.0, 5.0)):
        monkeypatch.setattr(tiers.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert tiers.budget_seconds() == seconds


@pytest.mark.parametrize(
    ("has", "failed"), {"": 0, "git": 1, "bf16,root": 1, "git,root": 2, "everything": 3, "cluster": 0}.items()
)
def test_skips_for_want_of_what_the_machine_has_fail(suite: pytest.Pytester, has: str, failed: int) -> None:
    suite.makepyfile(
        """
        import pytest
        from support.tiers import skip_reason
        def test_git(): pytest.skip(skip_reason("git", "no history"))
        @pytest.mark.skipif(True, reason=skip_reason("root", "it mounts"))
        def test_root(): pass
        def test_other(): pytest.skip("for no known reason")
        """
    )
    outcomes = suite.runpytest_inprocess(f"--has={has}").parseoutcomes()
    assert outcomes.get("failed", 0) + outcomes.get("errors", 0) == failed, outcomes


def test_passing_only_the_second_time_fails_the_run(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.makepyfile("def test_flaky(): pass")
    monkeypatch.setattr(tiers, "QUARANTINE", suite.makefile(".toml", nothing=""))
    assert suite.runpytest_inprocess().ret == 0
    result = suite.runpytest_inprocess("--second-try")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    (name,) = (line.split()[1] for line in result.outlines if line.startswith("FLAKY"))
    listed = suite.makefile(".toml", f'[[flaky]]\ntest = "{name}"\nsince = 2026-11-27\nwhy = "unknown"\n')
    monkeypatch.setattr(tiers, "QUARANTINE", listed)
    assert suite.runpytest_inprocess("--second-try").ret == 0
    listed.write_text(f'[[flaky]]\ntest = "{name.split("::")[0]}"\nsince = 2026-11-27\nwhy = "its file"\n')
    assert suite.runpytest_inprocess("--second-try").ret == 0


def test_quarantine_ends_after_14_days() -> None:
    entries = [{"test": "a", "since": datetime.date(2026, 11, 1)}, {"test": "b", "since": datetime.date(2026, 11, 2)}]
    assert tiers.overdue(entries, datetime.date(2026, 11, 16)) == ["a"]


def test_nothing_is_in_quarantine_for_too_long() -> None:
    entries = tomllib.loads(tiers.QUARANTINE.read_text()).get("flaky", [])
    assert tiers.overdue(entries, datetime.date.today()) == [], "mend these tests: their 14 days are over"
    assert all(entry["why"] and (tiers.TESTS.parent / entry["test"].split("::")[0]).exists() for entry in entries)
