"""One request as the host knows it. The device's copy of its length may be a step ahead (see state.py)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from specdecode_worker.engine.drafts.progress import DraftProgress
from specdecode_worker.engine.laws import law_of
from specdecode_worker.engine.messages import FinishReason, Logprobs, Submit
from specdecode_worker.speculation.law import Law


@dataclass(slots=True, eq=False)
class Request:
    """``tokens`` is the prompt and what was emitted. ``cached`` keys of it stand in the target's cache, as far as
    collected; steps in flight may add to it."""

    submit: Submit
    law: Law
    stops: frozenset[int]
    tokens: list[int]
    arrived_seconds: float
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    blocks_known: int = 0
    """How many of them stand in the device's block table."""
    epoch: int = 0
    """Counts preemptions: a step launched in an earlier epoch says nothing about this one."""
    prefilled: int = 0
    """Positions of ``tokens`` given to a prefill chunk so far, launched ones included."""
    prefill_end: int = 0
    """Prefill is over here: the tokens known at admission (prompt, and what was emitted before a preemption)."""
    cached: int = 0
    in_flight: deque[int] = field(default_factory=deque)
    """Most tokens that each launched and uncollected step can commit."""
    draft: DraftProgress = field(default_factory=DraftProgress)
    emitted: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    last_emit_seconds: float = 0.0
    finish: FinishReason | None = None
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    """Collected chunk by chunk until the first token takes them along."""

    @classmethod
    def of(cls, submit: Submit, eos_token_ids: tuple[int, ...], *, arrived_seconds: float) -> Request:
        sampling = submit.sampling
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos_token_ids))
        law = law_of(submit, eos_token_ids)
        return cls(submit=submit, law=law, stops=stops, tokens=list(submit.prompt), arrived_seconds=arrived_seconds)

    @property
    def id(self) -> str:
        return self.submit.request_id

    @property
    def decoding(self) -> bool:
        return self.slot >= 0 and self.prefilled == self.prefill_end

    @property
    def cached_bound(self) -> int:
        """Most keys that the device may hold by now."""
        return self.cached + sum(self.in_flight)

    @property
    def cached_least(self) -> int:
        """Fewest keys that the device holds once all launched steps have run: each commits one or more."""
        return self.cached + len(self.in_flight)

    def take(self, tokens: list[int]) -> list[int]:
        """Keeps what counts of newly emitted ``tokens``: up to a stop token, itself included, or the limit."""
        taken = []
        for token in tokens:
            if self.finish is not None:
                break
            taken.append(token)
            self.emitted += 1
            if token in self.stops and self.emitted >= self.submit.sampling.min_tokens:
                self.finish = "stop"
            elif self.emitted >= self.submit.sampling.max_tokens:
                self.finish = "length"
        self.tokens += taken
        if self.law.blocks and self.emitted >= self.law.min_tokens:
            self.law = replace(self.law, min_tokens=0)
        return taken

    def advance(self, most: int, committed: int) -> None:
        """A launched step was collected: it could have committed ``most`` positions and did ``committed``."""
        oldest = self.in_flight.popleft()
        assert oldest == most, "steps are collected in the order of their launch"
        self.cached += committed
        self.draft.collected(most, committed)

    def forget_cache(self) -> None:
        """Back to the queue: everything known so far becomes what is prefilled again."""
        self.slot, self.blocks, self.blocks_known = -1, [], 0
        self.prefilled = self.prefill_end = self.cached = 0
        self.in_flight.clear()
        self.prompt_logprobs.clear()
        self.draft = DraftProgress(self.draft.draft)
        self.epoch += 1
