"""The command: one JSON document, a table, plots, and errors that say what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdecode_simulator.command import main
from specdecode_simulator.policies.registry import DEPTH_POLICIES, ORACLES, OURS, SCALERS
from specdecode_simulator.scoring import run
from specdecode_simulator.scoring.run_store import read_runs
from specdecode_simulator.scoring.score import Interval, by_policy, dominated, targets

ROOT = Path(__file__).parents[3]
SHORT = ["--trace", "steady-cpu-quiet", "--hours", "0.1", "--seeds", "2", "--policy", "fixed-2"]


class Simulate:
    """The command with the recordings of the checkout. ``err`` is what its last call wrote to the error output."""

    def __init__(self, recordings: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._recordings, self._capsys = recordings, capsys
        self.err = ""

    def text(self, *flags: str, code: int = 0) -> str:
        """Return what the command writes to its output."""
        assert main([*flags, "--recordings", str(self._recordings)]) == code
        out, self.err = self._capsys.readouterr()
        return out

    def document(self, *flags: str) -> dict[str, Any]:
        """Return the JSON document that the command writes."""
        return json.loads(self.text(*flags, "--json"))  # type: ignore[no-any-return]


@pytest.fixture
def simulate(recordings: Path, capsys: pytest.CaptureFixture[str]) -> Simulate:
    return Simulate(recordings, capsys)


def test_json_is_one_document_with_the_figures_of_every_policy(simulate: Simulate) -> None:
    document = simulate.document(*SHORT)
    which = "--trace steady-cpu-quiet --policy fixed-2 --seeds 2 --hours 0.1"
    assert document["command"] == f"specdecode-simulate {which}"
    found = document["traces"]["steady-cpu-quiet"]["policies"]
    assert set(found) == {"fixed-2", "constrained", "clairvoyant"}
    assert found["constrained"]["time_per_token"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert {"plan_changes_per_hour", "slo_misses", "replica_hours"} <= set(found["fixed-2"])
    assert "steady-cpu-quiet, seed 1" in simulate.err


def test_seeds_begin_at_the_first_seed(simulate: Simulate) -> None:
    documents = [simulate.document(*SHORT, "--hours", "0.02", "--first-seed", first) for first in ("1", "2")]
    assert [document["seeds"] for document in documents] == [[1, 2], [2, 3]]
    assert "--first-seed 2 --seeds 2" in documents[1]["command"]
    assert documents[0]["traces"] != documents[1]["traces"]


@pytest.mark.slow
def test_rules_of_scaling_are_judged_on_scaled_traces_and_rules_of_depth_on_the_others(simulate: Simulate) -> None:
    document = simulate.document("--trace", "steady-gpu", "--trace", "ramp", "--seeds", "1", "--hours", "0.01")
    flat, scaled = (set(document["traces"][trace]["policies"]) for trace in ("steady-gpu", "ramp"))
    assert flat == {*OURS, *DEPTH_POLICIES, *ORACLES}
    assert scaled == {"ours", *SCALERS, *ORACLES}
    assert document["policies"]["traces"] == ["steady-gpu"]
    assert "decisions" not in document["traces"]["ramp"]


def test_what_was_kept_of_others_is_not_told(simulate: Simulate, tmp_path: Path) -> None:
    flags = ["--json", "--keep", str(tmp_path)]
    assert '"fixed-3"' in simulate.text(*SHORT, "--policy", "fixed-3", *flags)
    assert '"fixed-3"' not in simulate.text(*SHORT, *flags)


@pytest.mark.slow
def test_decisions_are_told_when_asked_for(simulate: Simulate) -> None:
    flags = ["--trace", "steady-cpu-full", "--policy", "ours", "--seeds", "1", "--hours", "0.5"]
    first, *_ = simulate.document(*flags, "--decisions")["traces"]["steady-cpu-full"]["decisions"]
    assert {"seconds", "reason"} <= set(first)


def test_two_processes_find_what_one_finds(simulate: Simulate) -> None:
    texts = [simulate.text(*SHORT, "--jobs", jobs) for jobs in ("1", "2")]
    assert texts[0] == texts[1]
    assert "over oracle" in texts[0]


def counted_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each run from now on adds the name of its policy."""
    asked: list[str] = []
    original = run.one

    def counting(name: str, *rest: Any) -> run.Run:
        asked.append(name)
        return original(name, *rest)

    monkeypatch.setattr(run, "one", counting)
    return asked


def test_runs_that_ended_are_not_run_again(simulate: Simulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*SHORT, "--json", "--keep", str(tmp_path)]
    first = simulate.text(*flags)
    file = tmp_path / "steady-cpu-quiet-0.1h-1.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 3, "a policy and two oracles"
    file.write_text(lines[0] + lines[1][:40])
    asked = counted_runs(monkeypatch)
    assert simulate.text(*flags) == first
    assert len(asked) == 2, "what was lost of the second seed, and nothing of the first"


def test_runs_without_trees_repeat_only_what_trees_change(
    simulate: Simulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*SHORT, "--hours", "0.02", "--seeds", "1", "--policy", "ours", "--policy", "ours-chains", "--json"]
    kept = [*flags, "--keep", str(tmp_path)]
    alone = simulate.text(*flags, "--chains")
    with_trees = simulate.text(*kept)
    asked = counted_runs(monkeypatch)
    assert simulate.text(*kept, "--chains") == alone
    assert asked == ["constrained", "clairvoyant"], "ours without trees ran beside ours, and fixed-2 has none"
    assert simulate.text(*kept) == with_trees
    assert len(asked) == 2


def test_runs_of_another_version_are_refused(simulate: Simulate, tmp_path: Path) -> None:
    file = tmp_path / "steady-cpu-quiet-0.1h-0.jsonl"
    file.write_text('{"policy": "ours"}\n')
    simulate.text(*SHORT, "--keep", str(tmp_path), code=1)
    assert f"specdecode-simulate: {file} holds no runs of this version; remove it" in simulate.err


def test_plots_and_a_table_that_begins_with_ours_are_written(simulate: Simulate, tmp_path: Path) -> None:
    flags = ["--trace", "steady-gpu", "--policy", "ours", "--seeds", "1", "--hours", "0.02"]
    found = simulate.document(*flags, "--plot", str(tmp_path))["traces"]["steady-gpu"]["policies"]["ours"]
    for name in ("simulate-regret.png", "simulate-policies.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    lines = (tmp_path / "simulate-table.md").read_text().splitlines()
    its_own = lines[lines.index("## steady-gpu (stationary)") :]
    assert any(line.startswith("| constrained | 1.000 |") for line in its_own)
    overview = [cell.strip() for cell in next(line for line in lines if line.startswith("| steady-gpu ")).split("|")]
    assert overview[1:4] == ["steady-gpu", "stationary", f"{found['time_per_token']['mean']:.3f}"]
    assert overview[6] == f"{found['plan_changes_per_hour']['mean']:.1f}"


def test_plots_without_matplotlib_say_what_to_install(
    simulate: Simulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    simulate.text(*SHORT, "--plot", str(tmp_path), code=1)
    assert "pip install matplotlib" in simulate.err
    assert "steady-cpu-quiet" not in simulate.err, "before anything was simulated"


@pytest.mark.parametrize(
    "flags",
    [
        ["--trace", "no-such"],
        ["--policy", "no-such"],
        ["--seeds", "0"],
        ["--first-seed", "-1"],
        ["--poll-seconds", "0.5"],
        ["--poll-seconds", "601"],
    ],
)
def test_wrong_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert "--list" in capsys.readouterr().err


def test_a_deployment_brings_its_bounds(simulate: Simulate, tmp_path: Path) -> None:
    """Depth 0 alone: the same as the fixed depth 0, but for exploration, of which there is none."""
    depth = {"min": 0, "max": 0, "initial": 0}
    draft = {"method": "eagle3", "draft": {"uri": "embedded://d"}, "depth": depth, "stability": "High"}
    file = tmp_path / "deployment.json"
    file.write_text(json.dumps({"spec": {"model": {"uri": "embedded://m"}, "speculation": draft}}))
    flags = [*SHORT, "--policy", "ours", "--policy", "fixed-0", "--deployment", str(file)]
    found = simulate.document(*flags)["traces"]["steady-cpu-quiet"]["policies"]
    assert found["fixed-0"]["time_per_token_over_ours"]["mean"] == pytest.approx(1.0, abs=0.02)
    file.write_text("{}")
    simulate.text(*flags, code=1)
    assert "deployment.json" in simulate.err


def test_missing_recordings_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--recordings", str(tmp_path)]) == 1
    assert "ranks-smollm2.json" in capsys.readouterr().err


def test_intervals_are_students() -> None:
    found = Interval.of([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.high - found.mean == pytest.approx(4.303 / 3**0.5, rel=1e-3)


def test_rules_are_summed_up_over_the_traces_that_all_of_them_ran() -> None:
    def trace(**over: float) -> dict[str, object]:
        policies = {name: {"time_per_token": {"mean": value}} for name, value in over.items()}
        return {"family": "shifting", "policies": {**policies, "wva": {"time_per_token": None}}}

    traces = {"a": trace(ours=1.1, trtllm=1.0), "b": trace(ours=1.0, trtllm=1.4), "c": trace(ours=5.0)}
    found = by_policy(traces)
    assert found["traces"] == ["a", "b"]
    over = found["over_constrained_oracle"]
    assert list(over) == ["ours", "trtllm"]
    assert over["trtllm"] == {"mean": 1.2, "worst": 1.4, "trace": "b"}
    assert by_policy({"c": traces["c"], "d": trace(trtllm=1.0)}) == {}


def test_targets_name_who_beats_ours_and_who_dominates_it() -> None:
    def policy(over: float, misses: float = 0.1, hours: float = 4.0) -> dict[str, object]:
        interval = {"mean": over, "low": over, "high": over}
        plain = {"plan_changes_per_hour": {"mean": 2.0}, "slo_misses": {"mean": misses}}
        relative = {"time_per_token_over_ours": {"mean": over / 1.05, "low": over / 1.05, "high": over / 1.05}}
        return {"time_per_token": interval, **plain, **relative, "replica_hours": {"mean": hours}}

    traces = {
        "a": {"family": "stationary", "policies": {"ours": policy(1.05), "fixed-2": policy(1.04)}},
        "b": {
            "family": "scaling",
            "policies": {"ours": policy(1.05), "fixed-1": policy(1.0), "wva": policy(1.2, 0.05, 3.0)},
        },
    }
    found = targets(traces)
    assert found["mean_over_constrained_oracle"] == 1.05
    assert set(found["beaten_by"]) == {"b"}
    assert set(found["beaten_by"]["b"]) == {"fixed-1"}
    assert found["dominated_by"] == {"b": ["wva"]}


def test_steps_are_in_time_by_seconds_or_by_drafts_and_only_where_they_were_answered() -> None:
    def answer(within: float, seconds: float, drafts: int, *, answered: bool = True) -> dict[str, float]:
        return {"at": 0.0, "within": within, "seconds": seconds, "drafts": drafts, "answered": float(answered)}

    strict = [answer(1.03, 20, 5000), answer(1.03, 400, 900), answer(1.03, 400, 5000)]
    ours = {"time_per_token": {"mean": 1.0}, "plan_changes_per_hour": {"mean": 1.0}}
    never = [answer(1.06, 10, 10, answered=False)]
    trace = {"family": "shifting", "policies": {"ours": ours}, "answers": [*strict, *never]}
    found = targets({"a": trace})["answers"]
    assert found["1.03"] == {"steps": 3, "within_30_s_or_1000_drafts": 2, "median_seconds": 400, "never": 0}
    assert found["1.06"] == {"steps": 1, "within_30_s_or_1000_drafts": 0, "median_seconds": 10, "never": 1}


@pytest.mark.parametrize(
    ("misses", "hours", "dominates"),
    [(0.1, 4.0, False), (0.1, 3.9, True), (0.0, 4.0, True), (0.0, 4.1, False), (0.2, 3.0, False)],
)
def test_a_rule_dominates_that_is_no_worse_in_both_and_better_in_one(
    misses: float, hours: float, dominates: bool
) -> None:
    def policy(misses: float, hours: float) -> dict[str, object]:
        return {"slo_misses": {"mean": misses}, "replica_hours": {"mean": hours}}

    found = dominated({"family": "scaling", "policies": {"ours": policy(0.1, 4.0), "dynamo": policy(misses, hours)}})
    assert found == (["dynamo"] if dominates else [])


def test_a_longer_poll_interval_is_another_run(simulate: Simulate, tmp_path: Path) -> None:
    flags = ["--trace", "acceptance-step", "--policy", "ours", "--seeds", "1", "--hours", "0.1"]
    for more in ([], ["--poll-seconds", "60"]):
        simulate.text(*flags, "--keep", str(tmp_path), *more)
    files = [f"acceptance-step-0.1h{poll}-0.jsonl" for poll in ("", "-poll60s")]
    assert sorted(file.name for file in tmp_path.iterdir()) == files
    often, seldom = (read_runs(tmp_path / file)["ours"].replicas for file in files)
    assert (len(often), len(seldom)) == (72, 6), "one entry for each poll"


# `--against`: the operator compared with the runs that an earlier version kept.


FLAGS = ["--trace", "acceptance-step", "--hours", "0.05", "--seeds", "2", "--policy", "ours"]


@pytest.fixture
def earlier(simulate: Simulate, tmp_path: Path) -> Path:
    """Runs of a version that took 10 % more time per token and changed the plan once an hour."""
    folder = tmp_path / "earlier"
    simulate.text(*FLAGS, "--keep", str(folder))
    for file in folder.iterdir():
        runs = [json.loads(line) for line in file.read_text().splitlines()]
        for kept in runs:
            if kept["policy"] == "ours":
                kept["figures"]["time_per_token"] *= 1.1
                kept["figures"]["plan_changes_per_hour"] = 1.0
        file.write_text("".join(json.dumps(kept) + "\n" for kept in runs))
    return folder


def test_differences_are_paired_by_seed(simulate: Simulate, earlier: Path) -> None:
    document = simulate.document(*FLAGS, "--against", str(earlier))
    figures = document["against"]["traces"]["acceptance-step"]
    ratio = document["traces"]["acceptance-step"]["policies"]["ours"]["time_per_token"]["mean"]
    assert figures["seeds"] == 2
    assert figures["ours"]["mean"] == ratio
    assert figures["difference"]["mean"] == pytest.approx(-0.1 * ratio, abs=1e-4)
    assert figures["plan_changes_per_hour"][1] == 1.0
    assert document["against"]["mean"]["difference"] == figures["difference"]["mean"]


def test_seeds_without_earlier_runs_are_left_out(simulate: Simulate, earlier: Path) -> None:
    (earlier / "acceptance-step-0.05h-1.jsonl").unlink()
    text = simulate.text(*FLAGS, "--against", str(earlier))
    (row,) = [line.split() for line in text.splitlines() if line.startswith("  acceptance-step  1 ")]
    assert float(row[4]) < -0.05
    assert "against 1.0" in " ".join(row)


def test_a_folder_without_these_runs_is_refused(simulate: Simulate, tmp_path: Path) -> None:
    simulate.text(*FLAGS, "--hours", "0.01", "--against", str(tmp_path / "none"), code=1)
    assert "--against: " in simulate.err


# hack/simulate-record: seeds, and what it refuses.


class Record:
    """hack/simulate-record in a repository of its own, with a simulator that writes its flags."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("hack/simulate-record", (ROOT / "hack" / "simulate-record").read_text(), mode=0o755)
        self.write(".venv/bin/python", "#!/bin/sh\necho --trace=steady-gpu", mode=0o755)
        self.write(".venv/bin/specdecode-simulate", '#!/bin/sh\necho "$@"', mode=0o755)
        self.write(".gitignore", "build/\n.venv/\n")
        worker = "worker/specdecode_worker"
        for part in ("operator", "simulator", f"{worker}/contract", f"{worker}/control", "benchmarks/recordings"):
            self.write(f"{part}/file", "1")
        self._run("git", "init", "--quiet")

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)

    def commit(self, text: str) -> str:
        """Commit everything, and return the hash."""
        self._run("git", "add", "--all")
        author = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        self._run("git", *author, "commit", "--quiet", "--message", text)
        return self._run("git", "rev-parse", "HEAD").stdout.strip()

    def seeds(self, *flags: str, code: int = 0) -> set[int]:
        """Run it. Return the first seeds of the documents that it made."""
        done = self._run("hack/simulate-record", *flags, code=code)
        documents = [self.folder / line for line in done.stdout.splitlines()]
        assert all("--trace=steady-gpu" in document.read_text() for document in documents)
        assert len(documents) == (0 if code else 4)
        return {int(document.stem.rpartition("-")[2]) for document in documents}

    def _run(self, *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done


def test_a_record_that_goes_on_after_another_commit_keeps_its_seeds(tmp_path: Path) -> None:
    record = Record(tmp_path)
    first = record.commit("first")
    assert record.seeds() == {10, int(first[:6], 16)}
    record.write("README.md", "texts")
    second = record.commit("texts")
    assert record.seeds() == {10, int(first[:6], 16)}
    shutil.rmtree(tmp_path / "build")  # as on another machine, which has the committed runs
    assert record.seeds() == {10, int(first[:6], 16)}
    assert record.seeds(second) == {10, int(second[:6], 16)}
    record.write("operator/file", "2")
    third = record.commit("another planner")
    assert record.seeds() == {10, int(third[:6], 16)}


@pytest.mark.parametrize(("path", "text"), [("operator/file", "2"), (".venv/bin/python", "#!/bin/sh\nexit 1")])
def test_a_record_is_refused_of_what_is_not_committed_and_without_its_traces(
    tmp_path: Path, path: str, text: str
) -> None:
    record = Record(tmp_path)
    record.commit("first")
    record.write(path, text, mode=0o755)
    assert record.seeds(code=1) == set()
