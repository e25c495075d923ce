"""One request as the host knows it. The device's copy of its length may be a step ahead (see state.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specdecode_worker.engine.drafts.draft_progress import DraftProgress
from specdecode_worker.engine.ipc.messages import FinishReason, Logprobs, Submit
from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE
from specdecode_worker.engine.sampling_params import law_of
from specdecode_worker.speculation.sampling.params import Law


@dataclass(frozen=True, slots=True)
class Hit:
    """``blocks`` hold the beginning of a text; in the last ``drafted`` of them its draft finds valid keys of its own.
    ``has_state``: what drafts read of the target at the prefix's last token is kept too."""

    blocks: Sequence[int] = ()
    drafted: int = 0
    has_state: bool = True


@dataclass(slots=True, eq=False)
class Request:
    """``tokens`` is the prompt and what was emitted. ``cached`` keys of it stand in the target's cache, as far as
    collected; steps in flight may add to it."""

    submit: Submit
    law: Law
    stops: frozenset[int]
    tokens: list[int]
    arrived_seconds: float
    order: int = 0
    """By arrival, the first is 1."""
    last_turn: int = 0
    """Orders those who decode by turns, where they are more than a step has tokens."""
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
    prefix: int = 0
    """Tokens whose keys were found in the cache at admission. Their blocks are others' too, and not written to."""
    cached_tokens: int = 0
    """Prompt tokens that were found at the first admission."""
    digests: list[bytes] = field(default_factory=list)
    """Of its full blocks, as far as they were asked for."""
    published: int = 0
    """Blocks, from the first, that others can find."""
    marked: int = 0
    """Blocks, from the first, of which it is settled whether the draft's keys in them are valid."""
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

    @property
    def drafted(self) -> int:
        """Draft slots below this hold keys of true states, if they are not older than the draft's start.

        While steps in flight hide where the draft stands, it is what it must be at least.
        """
        return self.cached + 1 if self.draft.caught_up else self.cached_bound - self.draft.lag + 1

    def unseen(self, first_slot: int) -> int:
        """Slots up to the root that the draft may have yet to see; its first slot is ``first_slot``.

        None of them lies in the prefix: those blocks are others' too, and not written to.
        """
        return min(self.draft.lag, self.cached_least + 1 - max(self.prefix, first_slot))

    def admit(self, slot: int, hit: Hit) -> None:
        """It runs from now on, behind what was found of it."""
        self.slot, self.blocks = slot, list(hit.blocks)
        self.published = self.marked = len(hit.blocks)
        self.prefix = self.prefilled = self.cached = len(hit.blocks) * BLOCK_SIZE
        self.prefill_end = len(self.tokens)
        self.draft.resume(self.prefix, hit.drafted * BLOCK_SIZE, has_state=hit.has_state)
        if self.epoch == 0:
            self.cached_tokens = self.prefix

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
        self.prefilled = self.prefill_end = self.cached = self.prefix = 0
        self.published = self.marked = 0
        self.in_flight.clear()
        self.prompt_logprobs.clear()
        self.draft = DraftProgress(self.draft.draft)
        self.epoch += 1
