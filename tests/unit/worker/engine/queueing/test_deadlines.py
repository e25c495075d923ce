"""Deadlines in order of time."""

from __future__ import annotations

from specdecode_worker.core.messages import Submit
from specdecode_worker.engine.scheduler import Deadlines
from specdecode_worker.sampling.params import Sampling


def submit(name: str, deadline: float = 0.0, queue: float = 0.0) -> Submit:
    sampling = Sampling(max_tokens=1, seed=0)
    return Submit(
        request_id=name, prompt=(1,), sampling=sampling, deadline_seconds=deadline, queue_deadline_seconds=queue
    )


def test_deadlines_expire_in_order() -> None:
    deadlines = Deadlines()
    assert deadlines.next_seconds == float("inf")
    for one in (submit("a", 9, 3), submit("b", 5), submit("c"), submit("d", 2)):
        deadlines.add(one, "abcd")
    assert deadlines.next_seconds == 2
    assert deadlines.pop_expired(1.9) == []
    assert deadlines.pop_expired(5) == [("d", "deadline"), ("a", "queue_timeout"), ("b", "deadline")]
    assert deadlines.next_seconds == 9
    assert deadlines.pop_expired(9) == [("a", "deadline")]
    assert deadlines.next_seconds == float("inf")


def test_deadlines_of_ended_requests_take_no_memory_forever() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.add(submit(str(number), 1e9), {str(number)})
    assert len(deadlines._heap) <= 1024
