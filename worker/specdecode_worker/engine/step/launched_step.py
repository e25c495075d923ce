"""A step that was queued on the device: what `collect` needs to read it back."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from specdecode_worker.engine.ipc.messages import Logprobs
from specdecode_worker.engine.scheduler import Row
from specdecode_worker.engine.shape_selector import Choice
from specdecode_worker.engine.stats.step_costs import StepSize
from specdecode_worker.engine.stats.step_recorder import Read
from specdecode_worker.engine.step.host_copy import Arrival
from specdecode_worker.engine.step.logprobs import ToldRows
from specdecode_worker.speculation.acceptance import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """``rows`` as batched; the first of them, as many as ``outcome`` has, chose a token. ``kept_depths`` are the
    synthetic knob's cuts. ``began_seconds`` is the monotonic clock at launch. ``outcome`` and ``ranked_BNK`` are the
    host's once they have arrived."""

    rows: tuple[Row, ...]
    epochs: tuple[int, ...]
    choice: Choice
    size: StepSize
    outcome: Outcome | None
    ranked_BNK: Tensor | None
    arrival: Arrival = field(default_factory=Arrival)
    emitted_told: ToldRows | None = None
    prompts_told: ToldRows | None = None
    kept_depths: tuple[int, ...]
    began_seconds: float
    draft_seconds: float

    @property
    def shadow_seconds(self) -> float:
        """Of the step, for draft passes behind the shape: with what the draft had to make up for before them."""
        passes = self.size.draft_passes
        return self.draft_seconds * min(self.choice.shadow_passes / passes, 1.0) if passes else 0.0

    def read(self) -> list[Read]:
        """Waits for the device, and reads what the rows that chose have brought."""
        if self.outcome is None:
            return []
        self.arrival.wait()
        emitted, path, ranks = (
            t.tolist() for t in (self.outcome.emitted_BD, self.outcome.path_BD, self.outcome.rank_BD)
        )
        # The draft's orderings are many numbers and matter where something was drafted in the shadow.
        shadowed = self.choice.shadow_passes > 0 and self.ranked_BNK is not None
        ranked = self.ranked_BNK.tolist() if shadowed and self.ranked_BNK is not None else None
        told = self.emitted_told.read() if self.emitted_told is not None else {}
        texts = [[token for token in row if token >= 0] for row in emitted]
        return [
            Read(
                tokens=texts[b],
                path=path[b],
                ranks=ranks[b],
                ranked_NK=ranked[b] if ranked is not None and not row.is_chunk else None,
                kept_depth=self.kept_depths[b],
                logprobs=tuple(told.get(b, ())[: len(texts[b])]),
            )
            for b, row in enumerate(self.rows[: len(emitted)])
        ]

    def read_prompts(self) -> dict[int, list[Logprobs]]:
        """By index of the row: logprobs of prompts that were asked for."""
        return self.prompts_told.read() if self.prompts_told is not None else {}
