"""The running requests of a modelled worker, as columns of one matrix."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdecode_simulator.records.acceptance_walks import VERIFIED, Form, Records
from specdecode_simulator.traces.job import Job
from specdecode_simulator.world.segment import Group

Array = Any
Members = dict[Group, Array]
"""Columns of the requests of each group."""
_ROOT, _LEFT, _CONTEXT, _ACCEPTED, _DRAFTS, _CODE, _JOB = range(7)
_ALL_COLUMNS = slice(None)
_KINDS = 64
"""Factor of the label in a code; the rest is the kind."""


@dataclass(slots=True)
class Walked:
    """Progress of all requests in a segment, by column. ``runs`` are those of ``segment.Outcome``."""

    steps: int
    """Steps until the last request ended."""
    tokens: Array
    shares: Array
    """Share of the steps until each request ended."""
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

    def groups(self) -> tuple[dict[Group, int], Members]:
        """Return the size and the columns of each group."""
        sizes: dict[Group, int] = {}
        members: Members = {}
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
        forms: Mapping[Group, Form],
        members: Members,
        steps: int,
    ) -> Walked:
        """Advance every request along its record. Contexts and remaining tokens stay as they are."""
        m = self._m[:, : self.count]
        roots, left, sums = m[_ROOT], m[_LEFT], dict[Group, Array]()
        accepted, shares, drafts = np.empty(self.count, dtype=np.int64), np.ones(self.count), np.full(self.count, steps)
        for group, columns in members.items():
            walk = records.walk(qualities[group], forms[group])
            roots[columns], sums[group] = walk.advance(roots[columns], steps)
            accepted[columns] = sums[group][:, 8]
        gained = steps + accepted
        walked = Walked(steps, np.minimum(gained, left), shares, {}, some_end=bool((gained > left).any()))
        if walked.some_end:
            walked.shares = shares = np.minimum(1.0, left / gained)
            accepted = (accepted * shares).astype(np.int64)
            drafts = np.maximum(1, np.rint(steps * shares)).astype(np.int64)
        for group, columns in members.items():
            form, own = forms[group], sums[group]
            verified: Array = 1 + (form.nodes if form.trim is None else own[:, VERIFIED] / steps)
            if walked.some_end:
                walked.runs[group] = (own * shares[columns, None]).sum(axis=0)
                walked.verify += float((shares[columns] * verified).sum())
            else:
                walked.runs[group] = own.sum(axis=0, dtype=float)
                walked.verify += float(len(own) * verified if form.trim is None else verified.sum())
            if form.nodes:
                m[_ACCEPTED][columns] += accepted[columns]
                m[_DRAFTS][columns] += drafts[columns]
        if walked.some_end:
            # Nobody runs steps without requests: a segment that all of them end in is shorter.
            walked.steps = math.ceil(steps * float(shares.max()) - 1e-9)
            walked.shares, walked.verify = shares * steps / walked.steps, walked.verify * steps / walked.steps
        return walked
