"""A step in flight, and the measurement of its time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from specdecode_worker.control.synthetic import Synthetic
from specdecode_worker.core.batch import Choice, Row
from specdecode_worker.core.device_state import HostCopy
from specdecode_worker.core.messages import Logprobs
from specdecode_worker.drafts.merged import OwnRanks
from specdecode_worker.engine.logprobs import RowLogprobs
from specdecode_worker.engine.scheduler import Scheduler
from specdecode_worker.engine.stats import RowResult, Statistics, StepSize

# Handle of a step that was queued on the device, with all that is needed to read its results.


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRows:
    """Results of rows that were queued together, as one graph or in one eager pass."""

    rows: tuple[Row, ...]
    """Rows of the pass. The first ones, as many as ``outcome_BC`` has, chose a token."""
    outcome_BC: Tensor | None = None
    """Result of verification, as `Outcome.columns`, on the host after ``host_copy``; None if no row chose a token."""
    ranked_BNK: Tensor | None = None
    """The draft's K best tokens by node, on the host after ``host_copy``; None if not needed."""
    host_copy: HostCopy = field(default_factory=HostCopy)
    output_logprobs: RowLogprobs | None = None
    """Logprobs of emitted tokens."""
    prompt_logprobs: RowLogprobs | None = None
    """Logprobs of prompt tokens."""
    own_ranks: OwnRanks | None = None
    """Ranked tokens of each draft; None if no task of the step merges drafts."""
    draft_seconds: float = 0.0
    """Duration of drafting."""

    def read(self, depth_limits: Sequence[int]) -> list[RowResult]:
        """Wait for the device and return the results of the rows that chose a token.

        Args:
            depth_limits: Largest accepted depth of each of these rows.
        """
        if self.outcome_BC is None:
            return []
        self.host_copy.wait()
        depth = self.outcome_BC.shape[1] // 3 - 1
        ranked = self.ranked_BNK.tolist() if self.ranked_BNK is not None else None
        logprobs = self.output_logprobs.read() if self.output_logprobs is not None else {}
        results = []
        for b, values in enumerate(self.outcome_BC.tolist()):
            tokens, path = values[: values[-1] + 1], values[depth + 1 : 2 * depth + 1]
            result = RowResult(tokens, path, values[2 * depth + 1 : -1], depth_limits[b])
            if ranked is not None and not self.rows[b].is_chunk:
                result.ranked_NK = ranked[b]
            if b in logprobs:
                result.logprobs = tuple(logprobs[b][: len(tokens)])
            if self.own_ranks is not None and not self.rows[b].is_chunk:
                result.credits = self.own_ranks.credit(b, path, tokens, result.ranks, depth_limits[b])
            results.append(result)
        return results

    def read_prompts(self) -> dict[int, list[Logprobs]]:
        """Wait for the requested logprobs of prompt tokens and return them by row index."""
        return self.prompt_logprobs.read() if self.prompt_logprobs is not None else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """Step that was launched and not collected yet."""

    rows: tuple[Row, ...]
    """Rows of the batch; those that chose a token come first."""
    parts: tuple[QueuedRows, ...]
    """Results of these rows, in the same order."""
    epochs: tuple[int, ...]
    """Number of preemptions of each row's request at launch."""
    choice: Choice
    size: StepSize
    shadow_passes: int = 0
    """Number of draft passes that verified nodes did not need."""
    depth_limits: tuple[int, ...]
    """Depth that the synthetic acceptance knob allows for each row that chose a token."""
    began_seconds: float
    """Monotonic clock at launch."""

    @property
    def shadow_seconds(self) -> float:
        """Part of the time of drafting attributed to shadow passes, in proportion to their share of all passes."""
        passes, seconds = self.size.draft_passes, sum(part.draft_seconds for part in self.parts)
        return seconds * self.shadow_passes / passes if passes else 0.0

    def read(self) -> list[RowResult]:
        """Wait for the device and return the results of the rows that chose a token."""
        results: list[RowResult] = []
        for part in self.parts:
            results += part.read(self.depth_limits[len(results) :])
        return results

    def read_prompts(self) -> dict[int, list[Logprobs]]:
        """Wait for the requested logprobs of prompt tokens and return them by row index."""
        prompts: dict[int, list[Logprobs]] = {}
        first = 0
        for part in self.parts:
            prompts |= {first + row: logprobs for row, logprobs in part.read_prompts().items()}
            first += len(part.rows)
        return prompts


# Timer of steps and of request-seconds, on the monotonic clock.
#
# It also pads steps to the minimum step time of the synthetic knobs.


class StepTimer:
    """Timer of the steps of one engine."""

    def __init__(self) -> None:
        self._collected_seconds = self._accounted_seconds = time.monotonic()

    def finish(self, step: LaunchedStep, synthetic: Synthetic) -> tuple[float, float]:
        """Finish the timing of a collected step, after sleeping if synthetic knobs require a longer step.

        Returns:
            The step time in seconds, without time spent on earlier steps, and the current time.
        """
        began = max(step.began_seconds, self._collected_seconds)
        least = 0.0
        if synthetic.knobs is not None:
            nodes = max(row.tree.verified - 1 for row in step.rows)
            context = max(row.request.cached for row in step.rows)
            drafts = (row.request.draft.draft for row in step.rows)
            least = synthetic.least_seconds(len(step.rows), nodes, context, drafts)
        now = time.monotonic()
        if now - began < least:
            time.sleep(least - (now - began))
            now = time.monotonic()
        self._collected_seconds = now
        return now - began, now

    def account(self, statistics: Statistics, scheduler: Scheduler, now: float) -> None:
        """Add the time since the last call to the request-seconds of the running and waiting requests."""
        elapsed = now - self._accounted_seconds
        statistics.running_request_seconds += elapsed * len(scheduler.running)
        statistics.waiting_request_seconds += elapsed * len(scheduler.waiting)
        self._accounted_seconds = now
