"""Capture of steps on all ranks at once: one graph per rank, with the collectives inside.

A collective that some ranks capture and others do not, or a replay that some ranks miss, would leave ranks waiting for
ever: NCCL requires that all ranks capture a collective and replay the graphs of one capture together
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html). So all ranks capture the same steps in
the same order, in stages, and go on only if all have succeeded:

    rank 0   rehearse, send Prepare, read answers, send Record, run, capture, read answers | send Replay, replay
    rank r                           rehearse, answer           run, capture, answer       |              replay

Nothing waits for another rank in a rehearsal, which leaves the collectives out, and in a capture, which runs nothing.
Only these two stages may fail; a rank whose run fails ends, as in an eager step, and the replica with it.

torch hands no events of captured collectives to the watchdog of NCCL, so its error handling needs no setting
(https://github.com/pytorch/pytorch/pull/102542). A replay that hangs is found by the watchdog of the engine instead.
vLLM captures the collectives of its ranks into one graph per rank, too
(https://github.com/vllm-project/vllm/pull/4818).
"""

from __future__ import annotations

import logging
from dataclasses import replace

from specdecode_worker.engine.graphs.capture_backends import Captured, RankCaptureFailed, StagedBackend, Work
from specdecode_worker.engine.parallel.leader_target import LeaderTarget
from specdecode_worker.engine.parallel.rank_graphs import problem_of
from specdecode_worker.engine.parallel.rank_group import RankGroup
from specdecode_worker.engine.parallel.rank_messages import CaptureState, Discard, Prepare, Record, Replay
from specdecode_worker.models.networks import collectives

log = logging.getLogger(__name__)


class LeaderBackend:
    """`CaptureBackend` of rank 0. ``own`` captures on this rank."""

    def __init__(self, own: StagedBackend, target: LeaderTarget, group: RankGroup) -> None:
        self._own, self._target, self._ranks = own, target, group
        self._captures = 0
        self._graphs: set[int] = set()
        """Numbers of the captured steps that the ranks hold."""

    def capture(self, work: Work) -> Captured:
        """Capture ``work`` on this rank and the target's part of it on the others, if it has one.

        Raises:
            CaptureFailed: The work has no part of the target, and this rank cannot capture it.
            RankCaptureFailed: A rank cannot capture it. No rank may replay the steps that it captured before.
            RankLost: Another rank ended meanwhile.
        """
        self._target.take_shape()
        self._require({0: problem_of(lambda: self._rehearse(work))})
        shape = self._target.take_shape()
        if shape is None:  # draft passes alone, which run on this rank
            return self._own.capture(work)
        self._ranks.send(Prepare(shape))
        self._require(_problems(self._ranks.capture_states()))
        self._ranks.send(Record())
        replays: list[Work] = []
        with self._ranks.collective():
            self._own.warm_up(work)
        problem = problem_of(lambda: replays.append(self._own.record(work)))
        states = self._ranks.capture_states()
        self._require({0: problem} | _problems(states))
        number, self._captures = self._captures, self._captures + 1
        self._graphs.add(number)
        assert all(state.graphs == len(self._graphs) for state in states), "all ranks hold the same graphs"
        log.info("%d graphs on each of %d ranks", len(self._graphs), 1 + len(states))
        captured = self._own.timed(lambda: self._replay(number, replays[0]))
        return replace(captured, release=lambda: self._release(number))

    def clear(self) -> None:
        """Release the captured steps of all ranks."""
        self._captures = 0
        self._graphs.clear()
        self._ranks.send(Discard())
        self._own.clear()

    def _rehearse(self, work: Work) -> None:
        with collectives.rehearsal():
            self._own.warm_up(work)

    def _replay(self, number: int, replay: Work) -> None:
        """Queue a captured step on all ranks. Raise RankLost if another rank ends meanwhile."""
        self._ranks.send(Replay(number))
        with self._ranks.collective():
            replay()

    def _release(self, number: int) -> None:
        """Release one captured step on all ranks."""
        self._graphs.remove(number)
        self._ranks.send(Discard(number))

    @staticmethod
    def _require(problems: dict[int, str]) -> None:
        """Raise RankCaptureFailed if a rank has a problem."""
        failed = [f"rank {rank}: {problem}" for rank, problem in problems.items() if problem]
        if failed:
            raise RankCaptureFailed("; ".join(failed))


def _problems(states: list[CaptureState]) -> dict[int, str]:
    return {rank: state.problem for rank, state in enumerate(states, start=1)}
