"""One modelled worker: queue, slots, KV tokens, chunked prefill, and decoding in segments of alike steps.

What the batch does within a segment is exact for every request (it walks its record); the step time is that of the
mean batch, and what arrives meanwhile waits for the segment's end, a quarter of a second at most.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdecode_operator.simulate.counters import Counters, Features, Moment
from specdecode_operator.simulate.job import Job, Limits, Truth
from specdecode_operator.simulate.segment import Calibrates, Group, Load, Outcome, Pilot, Segment
from specdecode_operator.simulate.walks import MOST_STEPS, Form

Array = Any
LEAST_SECONDS = 0.25
"""A segment is not cut shorter than this for an arrival."""
CALIBRATION_STEPS, CALIBRATION_CONTEXT = 6, 20.0
_ROOT, _LEFT, _CONTEXT, _ACCEPTED, _DRAFTS, _CODE, _JOB = range(7)
_EVERYBODY = slice(None)
_KINDS = 64
"""Codes are label x this + kind."""


@dataclass(slots=True)
class _Walked:
    """What the requests of a batch did in a segment, by column; ``runs`` as in Outcome."""

    tokens: Array
    shares: Array
    """Of the segment, until each ended."""
    runs: dict[Group, Array]
    verify: float = 0.0
    """Tokens verified in a step, in the mean."""
    some_end: bool = False


class Worker:
    """``clock`` is the world's; a report tells it less ``born``."""

    def __init__(
        self, index: int, truth: Truth, limits: Limits, pilot: Pilot, counters: Counters, born: float, offset: int
    ) -> None:
        self.index, self.truth, self.limits, self.pilot, self.counters = index, truth, limits, pilot, counters
        self.born = self.clock = born
        self.queue: deque[Job] = deque()
        self.prefilling: list[Job] = []
        self.decode_seconds = 0.0
        self.tokens = 0.0
        self.switches = 0
        self._offset = offset
        self._edges = np.array(truth.context_edges)
        self._jobs: dict[int, Job] = {}
        self._n = 0
        self._m = np.zeros((7, limits.max_num_seqs), dtype=np.int64)
        self._last: dict[Group, Form] = {}

    @property
    def running(self) -> int:
        return self._n + len(self.prefilling)

    @property
    def in_flight(self) -> int:
        return self.running + len(self.queue)

    def composition(self) -> dict[tuple[int, int], int]:
        """Running requests by (label, kind)."""
        found: dict[tuple[int, int], int] = {}
        for code in self._m[_CODE, : self._n].tolist():
            pair = divmod(code, _KINDS)
            found[pair] = found.get(pair, 0) + 1
        return found

    @property
    def kv_used(self) -> int:
        return int(self._m[_CONTEXT, : self._n].sum()) + sum(job.context for job in self.prefilling)

    def calibrate(self) -> None:
        """As the engine does before it serves: steps of a few shapes at the loads of the plan, timed on made-up
        requests. They are told as steps, and nothing else of them is."""
        if not isinstance(self.pilot, Calibrates):
            return
        table, factor = self.truth.table, self.truth.factor(self.born)
        for count, depth in self.pilot.calibration(self.limits.max_num_seqs):
            x = Features(float(count), float(count * (depth + 1)), CALIBRATION_CONTEXT * count, depth, 0.0)
            seconds = table.seconds(count, x.verify_tokens, depth, x.kv_tokens) * factor
            mean, squares = table.noisy(self._next_offset(CALIBRATION_STEPS), CALIBRATION_STEPS)
            total, of_squares = seconds * mean * CALIBRATION_STEPS, seconds**2 * squares * CALIBRATION_STEPS
            self.counters.timed(x, 0, CALIBRATION_STEPS, total, of_squares, CALIBRATION_STEPS * count)

    def offer(self, job: Job) -> None:
        job.queued = job.arrived if job.tries == 0 else self.clock
        job.context = job.todo = job.prompt
        self.counters.arrived(job.label, job.prompt)
        self.queue.append(job)

    def run(self, until: float) -> None:
        while self.clock < until:
            self._admit()
            if self.prefilling:
                self._prefill(until)
            elif self._n:
                self._decode(until)
            else:
                due = max(self.queue[0].queued, self.clock) if self.queue else until
                self.clock = min(max(due, self.clock), until) if due > self.clock else until

    def give_up(self, patience: float) -> list[Job]:
        """Jobs that waited longer than their clients do; they leave the queue."""
        gone = [job for job in self.queue if self.clock - job.queued > patience]
        for job in gone:
            self.queue.remove(job)
            self.counters.waiting_seconds += self.clock - job.queued
        return gone

    def report(self, boot_id: str, plan: Any, guard: Any) -> Any:
        pending = sum(max(0.0, self.clock - job.queued) for job in self.queue)
        return self.counters.report(
            Moment(
                boot_id=boot_id,
                worker=boot_id,
                clock_seconds=self.clock - self.born,
                plan=plan,
                guard=guard,
                max_num_seqs=self.limits.max_num_seqs,
                running=self.running,
                waiting=sum(job.queued <= self.clock for job in self.queue),
                pending_seconds=pending,
                kv_tokens_total=self.limits.kv_tokens,
                kv_tokens_used=self.kv_used,
            )
        )

    # --- admission and prompts ---------------------------------------------------------------------------------

    def _admit(self) -> None:
        if not self.queue:
            return
        used = self.kv_used
        while self.queue and self.queue[0].queued <= self.clock and self.running < self.limits.max_num_seqs:
            if used + self.queue[0].context + 1 > self.limits.kv_tokens and self.running:
                break
            job = self.queue.popleft()
            used += job.context
            self.counters.waiting_seconds += self.clock - job.queued
            if job.first is None:
                self.counters.latency("queue", self.clock - job.queued)
            self.prefilling.append(job)

    def _prefill(self, until: float) -> None:
        """Steps that carry prompt chunks; what decodes goes on in them."""
        load, members = self._load(prefill=True)
        segment = self.pilot.next(load) if self._n else Segment({})
        verify = sum(count * (segment.forms[group].nodes + 1) for group, count in load.groups.items())
        budget = max(16, self.limits.max_num_batched_tokens - verify)
        total = sum(job.todo for job in self.prefilling)
        typical = self._seconds(load, segment) + self.truth.table.prefill_seconds(min(total, budget))
        most = max(1, int((until - self.clock) / max(typical, 1e-6)))
        steps = min(math.ceil(total / budget), most, MOST_STEPS)
        each = min(total, steps * budget) / steps
        before, counted = self.clock, self.truth.table.prefill_seconds(each) * self.truth.factor(self.clock)
        if self._n:
            self._steps(load, members, segment, steps, chunk_tokens=each, chunk_seconds=counted)
        else:
            mean, squares = self.truth.table.noisy(self._next_offset(steps), steps)
            features = Features(0.0, 0.0, 0.0, 0, each)
            self.counters.timed(features, 0, steps, counted * mean * steps, counted**2 * squares * steps, 0)
            self.clock += counted * mean * steps
        self.counters.prefill_chunks += steps
        self.counters.running_seconds += (self.clock - before) * len(self.prefilling)
        self._prefilled(before, each * steps)

    def _prefilled(self, began: float, tokens: float) -> None:
        """First come first served; the first token of a prompt leaves with its last chunk."""
        done, seconds = 0.0, self.clock - began
        while self.prefilling and tokens - done >= self.prefilling[0].todo - 0.5:
            job = self.prefilling.pop(0)
            done += job.todo
            at = began + seconds * min(1.0, done / tokens)
            if job.first is None:
                job.first, job.left = at, job.output - 1
                self.counters.latency("ttft", at - job.arrived)
                self.counters.emitted(job.label, 1)
            if job.left <= 0:
                self._finish(job, at)
            else:
                self._start(job)
        if self.prefilling:
            self.prefilling[0].todo -= round(tokens - done)

    def _start(self, job: Job) -> None:
        code = job.label * _KINDS + job.kind
        self._jobs[job.id] = job
        self._m[:, self._n] = (job.root, job.left, job.context, job.accepted, job.drafts, code, job.id)
        self._n += 1

    def _finish(self, job: Job, at: float) -> None:
        job.done, job.left = at, 0
        if job.first is not None and job.output > 1:
            self.counters.latency("ttit", (at - job.first) / (job.output - 1), job.output - 1)
        self.counters.finished(job.label, job.accepted, job.drafts)

    # --- decoding ----------------------------------------------------------------------------------------------

    def _decode(self, until: float) -> None:
        load, members = self._load()
        segment = self.pilot.next(load)
        if segment.in_burst or segment.shadow:
            self._steps(load, members, segment, segment.most_steps)
            return
        horizon = until
        if self.queue and self._n < self.limits.max_num_seqs:
            horizon = min(until, max(self.queue[0].queued, self.clock + LEAST_SECONDS))
        typical = self._seconds(load, segment)
        fits = math.ceil((horizon - self.clock) / typical - 1e-6)
        self._steps(load, members, segment, max(1, min(fits, segment.most_steps, MOST_STEPS)))

    def _load(self, *, prefill: bool = False) -> tuple[Load, dict[Group, Array]]:
        """The batch, and the columns of each group."""
        m = self._m[:, : self._n]
        members: dict[Group, Array] = {}
        groups: dict[Group, int] = {}
        if self._n:
            buckets = self._edges.searchsorted(m[_CONTEXT])
            codes = m[_CODE] * 8 + buckets
            found = codes.tolist()
            for code, count in sorted(Counter(found).items()):
                label_kind, bucket = divmod(code, 8)
                group = Group(label_kind // _KINDS, bucket, label_kind % _KINDS)
                groups[group] = count
                members[group] = (codes == code).nonzero()[0] if count < self._n else _EVERYBODY
        return Load(self.clock, self.index, self._n, groups, float(m[_CONTEXT].sum()), prefill), members

    def _seconds(self, load: Load, segment: Segment) -> float:
        if not load.groups:
            return 0.0
        verify = sum(count * (segment.forms[group].nodes + 1) for group, count in load.groups.items())
        passes = max(segment.drafted_depth, *(form.depth for form in segment.forms.values()))
        seconds = self.truth.table.seconds(load.sequences, verify, passes, load.kv_tokens)
        return seconds * self.truth.factor(self.clock)

    def _steps(
        self,
        load: Load,
        members: dict[Group, Array],
        segment: Segment,
        steps: int,
        *,
        chunk_tokens: float = 0.0,
        chunk_seconds: float = 0.0,
    ) -> None:
        walked = self._walked(load, members, segment, steps)
        tokens, shares, verify = walked.tokens, walked.shares, walked.verify
        if walked.some_end:
            # Nobody runs steps without requests: a segment that all of them end in is shorter.
            steps, planned = math.ceil(steps * float(shares.max()) - 1e-9), steps
            shares, verify = shares * planned / steps, verify * planned / steps
        left, context = self._m[_LEFT, : self._n], self._m[_CONTEXT, : self._n]
        sequences, emitted = float(shares.sum()), float(tokens.sum())
        kv = float((context * shares).sum()) + 0.5 * emitted
        passes = max(segment.drafted_depth, *(form.depth for form in segment.forms.values()))
        typical = self.truth.table.seconds(sequences, verify, passes, kv) * self.truth.factor(self.clock)
        typical += chunk_seconds
        mean, squares = self.truth.table.noisy(self._next_offset(steps), steps)
        seconds = typical * mean * steps
        left -= tokens
        context += tokens
        outcome = Outcome(steps, seconds, sequences, emitted, walked.runs, prefill=chunk_tokens > 0)
        features = Features(sequences, verify, kv, passes, chunk_tokens)
        counted = max(steps - segment.dropped, 0)
        share = counted / steps
        self.counters.timed(
            features, load.context, counted, share * seconds, counted * typical**2 * squares, share * emitted
        )
        self._count(members, segment, outcome, shares, tokens)
        began, self.clock = self.clock, self.clock + seconds
        self.decode_seconds += seconds * sequences
        self.counters.running_seconds += seconds * sequences
        self.tokens += emitted
        self.pilot.measured(load, segment, outcome)
        self._retire(began, seconds, shares)
        self._preempt()

    def _walked(self, load: Load, members: dict[Group, Array], segment: Segment, steps: int) -> _Walked:
        """Every request goes on along its record. Contexts and what is left of the answers are as before."""
        m = self._m[:, : self._n]
        roots, left = m[_ROOT], m[_LEFT]
        walked = _Walked(np.empty(self._n, dtype=np.int64), np.ones(self._n), {})
        for group, columns in members.items():
            form = segment.forms[group]
            walk = self.truth.records.walk(self.truth.quality(group.kind, self.clock), form)
            roots[columns], sums = walk.advance(roots[columns], steps)
            accepted, due = sums[:, 8], left[columns]
            gained = steps + accepted
            if (gained <= due).all():  # most often nobody ends in a segment
                walked.tokens[columns], drafts = gained, steps
                walked.runs[group] = sums.sum(axis=0, dtype=float)
                walked.verify += load.groups[group] * (form.nodes + 1)
            else:
                share, walked.some_end = np.minimum(1.0, due / gained), True
                walked.tokens[columns], walked.shares[columns] = np.minimum(gained, due), share
                walked.runs[group] = (sums * share[:, None]).sum(axis=0)
                walked.verify += float(share.sum()) * (form.nodes + 1)
                accepted = (accepted * share).astype(np.int64)
                drafts = np.maximum(1, np.rint(steps * share)).astype(np.int64)
            if form.nodes:
                m[_ACCEPTED][columns] += accepted
                m[_DRAFTS][columns] += drafts
        return walked

    def _count(
        self, members: dict[Group, Array], segment: Segment, outcome: Outcome, shares: Array, tokens: Array
    ) -> None:
        for group, columns in members.items():
            self.counters.ran(group, float(shares[columns].sum()), segment, outcome)
            self.counters.emitted(group.label, float(tokens[columns].sum()))
            form = segment.forms[group]
            if not segment.in_burst:
                self.switches += self._last.get(group, form) is not form
                self._last[group] = form

    def _retire(self, began: float, seconds: float, shares: Array) -> None:
        ended = self._m[_LEFT, : self._n] <= 0
        if not ended.any():
            return
        for column in np.flatnonzero(ended).tolist():
            job = self._take(column)
            self._finish(job, began + seconds * float(shares[column]))
        self._keep(~ended)

    def _take(self, column: int) -> Job:
        job = self._jobs.pop(int(self._m[_JOB, column]))
        job.root, job.left = int(self._m[_ROOT, column]), int(self._m[_LEFT, column])
        job.accepted, job.drafts = int(self._m[_ACCEPTED, column]), int(self._m[_DRAFTS, column])
        return job

    def _keep(self, kept: Array) -> None:
        found = self._m[:, : self._n][:, kept]
        self._n = found.shape[1]
        self._m[:, : self._n] = found

    def _preempt(self) -> None:
        """The youngest gives its tokens back and starts again from them, when there is no room for all."""
        while self._n > 1 and self.kv_used > self.limits.kv_tokens:
            column = self._n - 1
            context = int(self._m[_CONTEXT, column])
            job = self._take(column)
            job.context = job.todo = context
            job.queued = self.clock
            self.queue.appendleft(job)
            self._keep(np.arange(self._n) != column)
            self.counters.preemptions += 1

    def _next_offset(self, steps: int) -> int:
        self._offset += steps
        return self._offset
