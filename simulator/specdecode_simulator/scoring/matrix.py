"""Traces x seeds x policies, in as many processes as are given, and the document that they make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdecode_simulator.policies.registry import CHAINS, DEPTH_POLICIES, SCALERS, judged_on
from specdecode_simulator.records.recordings import library, tuned
from specdecode_simulator.scoring.run import Run, run_trace
from specdecode_simulator.scoring.run_store import append_run, file_of, read_runs
from specdecode_simulator.scoring.score import CLAIRVOYANT, ORACLE, by_policy, scored, targets
from specdecode_simulator.traces.catalogue import OF_RECORD, named
from specdecode_simulator.world.fleet import POLL_SECONDS

Cell = tuple[str, int, Mapping[str, Run]]
"""Trace, seed, and the runs by policy."""
TraceRuns = Mapping[int, Mapping[str, Run]]
"""Runs of one trace, by seed and policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Runs to simulate. Without ``policies``, the default policies of each trace run. The oracles always run."""

    traces: tuple[str, ...]
    policies: tuple[str, ...] = ()
    seeds: int
    """Runs of every trace, of as many seeds in a row."""
    first_seed: int = 0
    hours: float
    recordings: Path
    speculation: Mapping[str, Any] | None = None
    """Fields of spec.speculation for ours; None: defaults."""
    poll_seconds: float = POLL_SECONDS
    """Time between two polls of the operator and of the constrained oracle."""
    keep: Path | None = None
    """Folder of runs that ended, of this code and fields; those with trees and those without share it."""

    @property
    def command(self) -> str:
        which = "" if set(self.traces) == set(OF_RECORD) else "".join(f" --trace {name}" for name in self.traces)
        which += "".join(f" --policy {name}" for name in self.policies)
        which += " --chains" if self.speculation == CHAINS else " --deployment FILE" if self.speculation else ""
        which += f" --poll-seconds {self.poll_seconds:g}" if self.poll_seconds != POLL_SECONDS else ""
        which += f" --first-seed {self.first_seed}" if self.first_seed else ""
        return f"specdecode-simulate{which} --seeds {self.seeds} --hours {self.hours:g}"

    @property
    def seed_range(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    def family(self, trace: str) -> str:
        return named(trace, self.hours).family

    def policies_of(self, trace: str) -> tuple[str, ...]:
        asked = self.policies or judged_on(self.family(trace))
        return tuple(dict.fromkeys((*asked, ORACLE, CLAIRVOYANT)))

    def cells(self) -> list[tuple[str, int]]:
        """Return (trace, seed), seed by seed, so that a run that is stopped has all traces for fewer seeds."""
        return [(trace, seed) for seed in self.seed_range for trace in self.traces]

    def run(self, jobs: int = 1) -> Iterator[Cell]:
        """(trace, seed, runs by policy) as they end."""
        cells = self.cells()
        if jobs == 1:
            yield from (self.cell(*cell) for cell in cells)
            return
        with ProcessPoolExecutor(jobs) as pool:
            futures = [pool.submit(self.cell, *cell) for cell in cells]
            try:
                yield from (future.result() for future in as_completed(futures))
            finally:
                pool.shutdown(cancel_futures=True)  # Otherwise a failed run is told once all others ended.

    def cell(self, trace: str, seed: int) -> Cell:
        policies, known = self.policies_of(trace), self.kept(self.keep, trace, seed) if self.keep else {}
        settings = tuned(self.recordings)
        settings = {**settings, "ours": self.speculation} if self.speculation else settings
        ended = {}
        shared, poll = library(self.recordings), self.poll_seconds
        for policy, run in run_trace(trace, self.hours, seed, policies, shared, settings, known, poll):
            name = self._kept_name(trace, policy)
            if self.keep and policy not in known:
                append_run(file_of(self.keep, trace, self.hours, seed, poll), name, run)
            known |= {other: run for other in policies if self._kept_name(trace, other) == name}
            ended[policy] = run
        return trace, seed, ended

    def kept(self, folder: Path, trace: str, seed: int) -> dict[str, Run]:
        """Return the runs of a folder by policy. Raises SimulatorError."""
        runs = read_runs(file_of(folder, trace, self.hours, seed, self.poll_seconds))
        names = {policy: self._kept_name(trace, policy) for policy in self.policies_of(trace)}
        return {policy: runs[name] for policy, name in names.items() if name in runs}

    def _kept_name(self, trace: str, policy: str) -> str:
        """Return the name of a policy's runs in files: another one without trees, where these make a difference."""
        are_alike = SCALERS if self.family(trace) == "scaling" else DEPTH_POLICIES
        if self.speculation != CHAINS or policy in are_alike:
            return policy
        return f"{policy.removesuffix('-chains')}-chains"

    def by_trace(self, ended: Iterable[Cell]) -> dict[str, dict[int, Mapping[str, Run]]]:
        """Return the runs by trace and seed in the order of this matrix, whatever order they ended in."""
        by_cell = {(trace, seed): runs for trace, seed, runs in ended}
        return {trace: {seed: by_cell[trace, seed] for seed in self.seed_range} for trace in self.traces}

    def document(self, runs: Mapping[str, TraceRuns], *, decisions: bool = False) -> dict[str, Any]:
        """Scores and targets; with ``decisions`` ours' plan changes of the first seed, too."""
        traces = {name: self._trace(name, runs[name], decisions) for name in self.traces}
        head = {"command": self.command, "hours": self.hours, "seeds": list(self.seed_range)}
        return {**head, "traces": traces, "policies": by_policy(traces), "targets": targets(traces)}

    def _trace(self, trace: str, runs: TraceRuns, decisions: bool) -> dict[str, Any]:
        ours = [policies["ours"] for policies in runs.values() if "ours" in policies]
        answers = [answer for run in ours for answer in run.answers]
        document = {"family": self.family(trace), "policies": scored(runs), "answers": answers}
        return {**document, "decisions": list(ours[0].decisions)} if ours and decisions else document
