"""The running requests of a modelled worker, as columns of one matrix."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdecode_simulator.records.acceptance_walks import VERIFIED, Form, Records
from specdecode_simulator.traces.job import Job
from specdecode_simulator.world.segment import Group

Array = Any
_ROOT, _LEFT, _CONTEXT, _ACCEPTED, _DRAFTS, _CODE, _JOB = range(7)
_ALL_COLUMNS = slice(None)
_KINDS = 64
"""Factor of the label in a code; the rest is the kind."""


@dataclass(slots=True)
class Walked:
    """Progress of all requests in a segment, by column. ``runs`` are those of ``segment.Outcome``."""

    tokens: Array
    shares: Array
    """Share of the segment until each request ended."""
    runs: dict[Group, Array]
    verify: float = 0.0
    """Mean number of tokens verified in a step."""
    some_end: bool = False


class Batch:
    """Running requests in order of their start. ``context_edges`` are the upper edges of the context buckets."""

    def __init__(self, capacity: int, context_edges: tuple[int, ...]) -> None:
        """Start empty, with room for ``capacity`` requests."""
        self.count = 0
        self._edges = np.array(context_edges)
        self._jobs: dict[int, Job] = {}
        self._m = np.zeros((7, capacity), dtype=np.int64)

    @property
    def lefts(self) -> Array:
        """View of the tokens that each request has still to emit."""
        return self._m[_LEFT, : self.count]

    @property
    def contexts(self) -> Array:
        """View of the context lengths in tokens."""
        return self._m[_CONTEXT, : self.count]

    def add(self, job: Job) -> None:
        """Start a request whose prompt is prefilled."""
        code = job.label * _KINDS + job.kind
        self._jobs[job.id] = job
        self._m[:, self.count] = (job.root, job.left, job.context, job.accepted, job.drafts, code, job.id)
        self.count += 1

    def pop(self, column: int) -> Job:
        """Return the job of a column with its progress. `keep` must drop the column afterwards."""
        job = self._jobs.pop(int(self._m[_JOB, column]))
        job.root, job.left = int(self._m[_ROOT, column]), int(self._m[_LEFT, column])
        job.accepted, job.drafts = int(self._m[_ACCEPTED, column]), int(self._m[_DRAFTS, column])
        return job

    def keep(self, columns: Array) -> None:
        """Keep the columns of this mask only."""
        rest = self._m[:, : self.count][:, columns]
        self.count = rest.shape[1]
        self._m[:, : self.count] = rest

    def composition(self) -> dict[tuple[int, int], int]:
        """Count the requests by (label, kind)."""
        counts: dict[tuple[int, int], int] = {}
        for code in self._m[_CODE, : self.count].tolist():
            pair = divmod(code, _KINDS)
            counts[pair] = counts.get(pair, 0) + 1
        return counts

    def groups(self) -> tuple[dict[Group, int], dict[Group, Array]]:
        """Return the size and the columns of each group."""
        sizes: dict[Group, int] = {}
        members: dict[Group, Array] = {}
        if self.count:
            buckets = self._edges.searchsorted(self.contexts)
            codes = self._m[_CODE, : self.count] * 8 + buckets
            for code, size in sorted(Counter(codes.tolist()).items()):
                label_kind, bucket = divmod(code, 8)
                group = Group(label_kind // _KINDS, bucket, label_kind % _KINDS)
                sizes[group] = size
                members[group] = (codes == code).nonzero()[0] if size < self.count else _ALL_COLUMNS
        return sizes, members

    def walk(
        self,
        records: Records,
        qualities: dict[Group, float],
        forms: dict[Group, Form],
        members: dict[Group, Array],
        steps: int,
    ) -> Walked:
        """Advance every request along its record. Contexts and remaining tokens stay as they are."""
        m = self._m[:, : self.count]
        roots, left = m[_ROOT], m[_LEFT]
        walked = Walked(np.empty(self.count, dtype=np.int64), np.ones(self.count), {})
        for group, columns in members.items():
            form = forms[group]
            roots[columns], sums = records.walk(qualities[group], form).advance(roots[columns], steps)
            accepted, due = sums[:, 8], left[columns]
            nodes = form.nodes if form.trim is None else sums[:, VERIFIED] / steps
            gained = steps + accepted
            if (gained <= due).all():  # In most segments no request ends.
                walked.tokens[columns], drafts = gained, steps
                walked.runs[group] = sums.sum(axis=0, dtype=float)
                walked.verify += float((np.ones(len(gained)) * (nodes + 1)).sum())
            else:
                share, walked.some_end = np.minimum(1.0, due / gained), True
                walked.tokens[columns], walked.shares[columns] = np.minimum(gained, due), share
                walked.runs[group] = (sums * share[:, None]).sum(axis=0)
                walked.verify += float((share * (nodes + 1)).sum())
                accepted = (accepted * share).astype(np.int64)
                drafts = np.maximum(1, np.rint(steps * share)).astype(np.int64)
            if form.nodes:
                m[_ACCEPTED][columns] += accepted
                m[_DRAFTS][columns] += drafts
        return walked
