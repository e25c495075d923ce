"""One modelled worker: queue, slots, KV tokens, chunked prefill, and decoding in segments of equal steps.

What the batch does within a segment is exact for every request (it walks its record). The step time is that of the
requests that run, from one end of a request to the next one. A segment ends where a request arrives.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from specdecode_simulator.records.acceptance_walks import MOST_STEPS
from specdecode_simulator.traces.job import Job, Limits
from specdecode_simulator.world.batch import Batch, Members, Walked
from specdecode_simulator.world.counters import Counters, Features
from specdecode_simulator.world.segment import Calibrates, Group, Load, Outcome, Pilot, Segment
from specdecode_simulator.world.truth import Truth
from specdecode_worker.contract import TreeShape

Array = Any
WAIT_SECONDS = 0.25
"""Most time between a slot or KV tokens that become free and the start of a request that waits for them."""
CALIBRATION_STEPS, CALIBRATION_CONTEXT = 6, 20.0


class Worker:
    """Modelled worker. ``clock`` is the world's; a report has the time since ``born``."""

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
        self.batch = Batch(limits.max_num_seqs, truth.context_edges)
        self._last: dict[Group, TreeShape] = {}

    @property
    def running(self) -> int:
        return self.batch.count + len(self.prefilling)

    @property
    def in_flight(self) -> int:
        return self.running + len(self.queue)

    @property
    def kv_used(self) -> int:
        return int(self.batch.contexts.sum()) + sum(job.context for job in self.prefilling)

    def calibrate(self) -> None:
        """Time steps of a few shapes at the loads of the plan, as the engine does before it serves.

        They are reported as steps, and count for nothing else.
        """
        if not isinstance(self.pilot, Calibrates):
            return
        table, factor = self.truth.table, self.truth.factor(self.born)
        for count, form in self.pilot.calibration(self.limits.max_num_seqs):
            x = Features(float(count), float(count * (form.nodes + 1)), CALIBRATION_CONTEXT * count, form.depth, 0.0)
            seconds = table.seconds(count, x.verify_tokens, form.depth, x.kv_tokens) * factor
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
            elif self.batch.count:
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
            pending,
            boot_id=boot_id,
            worker=boot_id,
            clock_seconds=self.clock - self.born,
            plan=plan,
            guard=guard,
            max_num_seqs=self.limits.max_num_seqs,
            running=self.running,
            waiting=sum(job.queued <= self.clock for job in self.queue),
            kv_tokens_total=self.limits.kv_tokens,
            kv_tokens_used=self.kv_used,
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
        segment = self.pilot.next(load) if self.batch.count else Segment({})
        verify = sum(count * (segment.forms[group].nodes + 1) for group, count in load.groups.items())
        budget = max(16, self.limits.max_num_batched_tokens - verify)
        total = sum(job.todo for job in self.prefilling)
        typical = self._seconds(load, segment) + self.truth.table.prefill_seconds(min(total, budget))
        most = max(1, int((until - self.clock) / max(typical, 1e-6)))
        steps = min(math.ceil(total / budget), most, MOST_STEPS)
        each = min(total, steps * budget) / steps
        before = self.clock
        if self.batch.count:
            steps = self._steps(load, members, segment, steps, each)
        else:
            counted = self.truth.table.prefill_seconds(each) * self.truth.factor(self.clock)
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
                self.batch.add(job)
        if self.prefilling:
            self.prefilling[0].todo -= round(tokens - done)

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
        if self.queue:
            due = self.queue[0].queued
            horizon = min(until, due if due > self.clock else self.clock + WAIT_SECONDS)
        typical = self._seconds(load, segment)
        fits = math.ceil((horizon - self.clock) / typical - 1e-6)
        self._steps(load, members, segment, max(1, min(fits, segment.most_steps, MOST_STEPS)))

    def _load(self, *, prefill: bool = False) -> tuple[Load, Members]:
        """Return the batch as a load, and the columns of each group."""
        groups, members = self.batch.groups()
        contexts = float(self.batch.contexts.sum())
        return Load(self.clock, self.index, self.batch.count, groups, contexts, prefill), members

    def _seconds(self, load: Load, segment: Segment) -> float:
        if not load.groups:
            return 0.0
        verify = sum(count * (segment.forms[group].nodes + 1) for group, count in load.groups.items())
        passes = max(segment.drafted_depth, *(form.depth for form in segment.forms.values()))
        seconds = self.truth.table.seconds(load.sequences, verify, passes, load.kv_tokens)
        return seconds * self.truth.factor(self.clock)

    def _steps(self, load: Load, members: Members, segment: Segment, steps: int, chunk_tokens: float = 0.0) -> int:
        """Run the steps. Return how many they were: fewer than ``steps`` if all requests end before."""
        qualities = {group: self.truth.quality(group.kind, self.clock, group.context) for group in members}
        walked = self.batch.walk(self.truth.records, qualities, segment.forms, members, steps)
        ends, steps = walked.ends, int(walked.ends.max())
        mean, squares = self.truth.table.noisy(self._next_offset(steps), steps)
        factor, began, request_seconds = self.truth.factor(self.clock), self.clock, 0.0
        clock_at = {0: began}
        for first, last in pairwise(sorted({0, *ends.tolist()})):
            x, emitted = self._part(members, segment, walked, first, last, chunk_tokens)
            typical = self.truth.table.seconds(x.sequences, x.verify_tokens, x.draft_passes, x.kv_tokens)
            typical = (typical + self.truth.table.prefill_seconds(chunk_tokens)) * factor
            counted = min(last - first, max(0, last - segment.dropped))
            self.counters.timed(
                x, load.context, counted, typical * mean * counted, typical**2 * squares * counted, emitted * counted
            )
            clock_at[last] = clock_at[first] + typical * mean * (last - first)
            request_seconds += typical * mean * (last - first) * x.sequences
        self.clock = clock_at[steps]
        emitted, sequences = float(walked.tokens.sum()), float(ends.sum()) / steps
        outcome = Outcome(steps, self.clock - began, sequences, emitted, walked.runs, prefill=chunk_tokens > 0)
        self._count(load.context, members, segment, outcome, walked)
        self.batch.advance(walked.tokens)
        self.decode_seconds += request_seconds
        self.counters.running_seconds += request_seconds
        self.tokens += emitted
        self.pilot.measured(load, segment, outcome)
        self._retire([clock_at[end] for end in ends.tolist()])
        self._preempt()
        return steps

    def _part(
        self, members: Members, segment: Segment, walked: Walked, first: int, last: int, chunk_tokens: float
    ) -> tuple[Features, float]:
        """Return the mean of the steps ``first`` to ``last``, between which no request ends, and the tokens of one."""
        running = walked.ends >= last
        a_step = walked.tokens / walked.ends
        kv_tokens = (self.batch.contexts + a_step * (first + last) / 2)[running].sum()
        forms = [segment.forms[group] for group, columns in members.items() if running[columns].any()]
        passes = max(segment.drafted_depth, *(form.depth for form in forms))
        verified = walked.verified[running].sum()
        x = Features(float(running.sum()), float(verified), float(kv_tokens), passes, chunk_tokens)
        return x, float(a_step[running].sum())

    def _count(self, context: int, members: Members, segment: Segment, outcome: Outcome, walked: Walked) -> None:
        for group, columns in members.items():
            self.counters.ran(group, context, int(walked.ends[columns].sum()), segment, outcome)
            self.counters.emitted(group.label, float(walked.tokens[columns].sum()))
            shape = segment.forms[group].shape
            if not segment.in_burst:
                self.switches += self._last.get(group, shape) != shape
                self._last[group] = shape

    def _retire(self, done_at: Sequence[float]) -> None:
        ended = self.batch.lefts <= 0
        if not ended.any():
            return
        for column in np.flatnonzero(ended).tolist():
            job = self.batch.pop(column)
            self._finish(job, done_at[column])
        self.batch.keep(~ended)

    def _preempt(self) -> None:
        """The youngest gives its tokens back and starts again from them, when there is no room for all."""
        while self.batch.count > 1 and self.kv_used > self.limits.kv_tokens:
            column = self.batch.count - 1
            context = int(self.batch.contexts[column])
            job = self.batch.pop(column)
            job.context = job.todo = context
            job.queued = self.clock
            self.queue.appendleft(job)
            self.batch.keep(np.arange(self.batch.count) != column)
            self.counters.preemptions += 1

    def _next_offset(self, steps: int) -> int:
        self._offset += steps
        return self._offset
