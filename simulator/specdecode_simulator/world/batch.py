"""The running requests of a modelled worker, as columns of one matrix."""

from __future__ import annotations

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

    ends: Array
    """Steps until each request ended, or all of them."""
    tokens: Array
    verified: Array
    """Mean number of tokens verified in a step."""
    runs: dict[Group, Array]


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

    def advance(self, tokens: Array) -> None:
        """Add the tokens that each request emitted."""
        self.lefts[:] -= tokens
        self.contexts[:] += tokens

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
        """Advance every request along its record. `advance` must add the tokens afterwards."""
        m = self._m[:, : self.count]
        ends, verified = np.full(self.count, steps), np.empty(self.count)
        accepted = np.empty(self.count, dtype=np.int64)
        runs: dict[Group, Array] = {}
        for group, columns in members.items():
            form, roots, left = forms[group], m[_ROOT][columns], m[_LEFT][columns]
            walk = records.walk(qualities[group], form)
            after, own = walk.advance(roots, steps)
            ended = steps + own[:, 8] > left
            if ended.any():
                in_steps = np.full(len(own), steps)
                in_steps[ended], own[ended] = walk.advance_to(roots[ended], left[ended], steps)
                ends[columns] = in_steps
            m[_ROOT][columns] = after
            accepted[columns], runs[group] = own[:, 8], own.sum(axis=0, dtype=np.int64)
            verified[columns] = 1 + (form.nodes if form.trim is None else own[:, VERIFIED] / ends[columns])
            if form.nodes:
                m[_ACCEPTED][columns] += accepted[columns]
                m[_DRAFTS][columns] += ends[columns]
        return Walked(ends, np.minimum(ends + accepted, m[_LEFT]), verified, runs)
