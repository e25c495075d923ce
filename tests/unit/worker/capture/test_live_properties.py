"""Property: any order of plans, requests and deletions leaves no record that the last rules forbid."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from captured import record
from hypothesis import given, settings
from hypothesis import strategies as st
from live_captures import live, read, settle

from specdecode_worker.capture import Record
from specdecode_worker.capture.live import LiveRecorder
from specdecode_worker.contract.capture import CaptureRules

BASE_SECONDS = 1e9
"""Time of all recorders. Records and ``delete_before`` lie up to ten seconds before it."""
TASKS, USERS = ("code", "qa"), ("", "ann", "bob")

ages = st.integers(min_value=0, max_value=10)
rules = st.none() | st.builds(
    lambda share, code, consent, age, redact: CaptureRules(
        share=share, task_shares={"code": code}, consent=consent, delete_before=BASE_SECONDS - age, redact=redact
    ),
    st.sampled_from((0.0, 1.0)),
    st.sampled_from((0.0, 1.0)),
    st.sampled_from(("OptOut", "OptIn")),
    ages,
    st.sampled_from((None, "redaction_hooks:odd_ones")),
)
requests = st.tuples(st.sampled_from(TASKS), st.booleans(), ages, st.sampled_from(USERS))
steps = st.lists(
    st.tuples(st.just("plan"), rules)
    | st.tuples(st.just("begin"), requests)
    | st.tuples(st.just("end"), st.integers(min_value=0, max_value=3))
    | st.tuples(st.just("delete"), st.sampled_from(("ann", "bob")))
    | st.tuples(st.just("settle"), st.none()),
    max_size=24,
)


@dataclass
class Requests:
    """Requests as the server would run them, and what was true when each of them began and ended."""

    recorder: LiveRecorder
    current: CaptureRules | None
    running: list[tuple[Record, int, CaptureRules]] = field(default_factory=list)
    ended: dict[int, tuple[Record, CaptureRules | None, bool]] = field(default_factory=dict)
    """Record, rules at its end, and whether its user was deleted since, by number."""
    epoch_of: dict[int, int] = field(default_factory=dict)
    number: int = 0

    def begin(self, task: str, permitted: bool, age: int, user: str) -> None:
        recorder = self.recorder
        if self.current is None or (recorder.consent == "OptIn" and not permitted) or not recorder.should_capture(task):
            return
        assert recorder.share_of(task) > 0
        self.number += 1
        made = record(self.number, task=task, time_seconds=BASE_SECONDS - age)
        made = msgspec.structs.replace(made, user=recorder.subject_of(user), permitted=permitted)
        self.running.append((made, recorder.epoch, self.current))

    def end(self, index: int) -> None:
        if index < len(self.running):
            made, epoch, _ = self.running.pop(index)
            self.ended[made.sampling.seed] = (made, self.current, False)
            self.epoch_of[made.sampling.seed] = epoch
            self.recorder.enqueue(made, epoch)

    def delete(self, user: str) -> None:
        subject = self.recorder.subject_of(user)
        self.recorder.delete_user(user)
        for number, (made, at_end, deleted) in self.ended.items():
            self.ended[number] = (made, at_end, deleted or made.user == subject)

    def is_allowed(self, made: Record) -> bool:
        _, at_end, deleted = self.ended[made.sampling.seed]
        now = self.current
        return (
            now is not None
            and not deleted
            and self.epoch_of[made.sampling.seed] == self.recorder.epoch
            and made.time_seconds >= now.delete_before
            and (made.permitted or now.consent == "OptOut")
            and not (at_end is now and now.redact is not None and made.sampling.seed % 2 == 0)
        )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rules, steps)
def test_no_record_stays_that_the_last_rules_forbid(
    first: CaptureRules | None, order: list[tuple[str, object]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with live(folder, first, clock=lambda: BASE_SECONDS) as recorder:
            done = Requests(recorder, first)
            for step, value in order:
                if step == "plan":
                    done.current = value
                    recorder.apply(done.current)
                elif step == "settle":
                    settle(recorder)
                elif step == "begin":
                    done.begin(*value)
                else:
                    getattr(done, step)(value)
            settle(recorder)
            kept = read(folder)
            assert [made for made in kept if not done.is_allowed(made)] == []
            report = recorder.report()
            assert (report.conversations, report.problem) == (len(kept), None)
            assert report.oldest == min((made.time_seconds for made in kept), default=None)
            if done.current is None:
                assert not list(folder.iterdir())
            under_last = {number for number, (_, at_end, _) in done.ended.items() if at_end is done.current}
            expected = {number for number in under_last if done.is_allowed(done.ended[number][0])}
            assert expected <= {made.sampling.seed for made in kept}, "what the last rules permit is there"
