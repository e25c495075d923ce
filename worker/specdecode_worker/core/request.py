"""A request in the engine: its tokens, its progress, and the rules by which it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from specdecode_worker.core.kv_cache import BLOCK_SIZE, CachedPrefix
from specdecode_worker.core.messages import FinishReason, Logprobs, Sampling, Submit
from specdecode_worker.guided.guide import Guide
from specdecode_worker.sampling.params import SamplingParams

# Rule for the end of a request by its tokens. Engine and server share it, so it needs no torch.


@dataclass(frozen=True, slots=True)
class FinishRule:
    """Rule that ends one request at a stop token, or at its largest number of output tokens."""

    stops: frozenset[int]
    """Token ids that end the request."""
    min_tokens: int
    max_tokens: int

    @classmethod
    def of(cls, sampling: Sampling, eos_token_ids: Iterable[int]) -> FinishRule:
        """Return the rule for the sampling parameters of a request and the end tokens of the model."""
        eos = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        return cls(frozenset(sampling.stop_token_ids) | eos, sampling.min_tokens, sampling.max_tokens)

    def may_finish(self, tokens: Sequence[int], emitted: int) -> bool:
        """Return whether one of ``tokens`` may end the request; the last one is output token number ``emitted``."""
        return emitted >= self.max_tokens or not self.stops.isdisjoint(tokens)

    def finish(self, token: int, emitted: int) -> Literal["stop", "length"] | None:
        """Return the finish reason at ``token``, which is output token number ``emitted`` (from 1); None to go on."""
        if token in self.stops and emitted >= self.min_tokens:
            return "stop"
        return "length" if emitted >= self.max_tokens else None


# Progress of a draft through the text of one request, updated by the drafters and by committed steps.


@dataclass(slots=True)
class DraftProgress:
    """Progress of a draft through the text of one request.

    ``lag`` is an upper bound on the number of positions up to the root, the root included, that the draft has not
    processed yet.
    """

    draft: str = ""
    """Hash of the draft whose keys are in the blocks of the request."""
    lag: int = 1
    caught_up: int = 0
    """Number of steps in flight, the oldest ones, that the draft has already processed; they do not affect ``lag``."""
    start: int = 1
    """First position whose keys the draft attends to. 0 and 1 mean all keys, including slot 0 if it exists."""
    features_from: int = 0
    """First position from which the ring of DeviceState holds the target states that the draft reads."""

    def resume(self, prefix: int, drafted: int, *, has_state: bool) -> None:
        """Restart behind a cached prefix.

        Args:
            prefix: Length of the prefix, in tokens.
            drafted: Number of tokens at the end of the prefix for which the draft's own keys are valid.
            has_state: True if the target state of the prefix's last token is in the ring.
        """
        self.lag, self.caught_up = 1, 0
        self.start = max(prefix - drafted, 1)
        self.features_from = max(prefix - 1, 0)
        if prefix and not has_state:
            self.start = self.features_from = prefix + 1

    def record_launch(self, most: int) -> None:
        """Record the launch of a step that may commit up to ``most`` positions, which the draft has not processed."""
        self.lag += most

    def record_collect(self, most: int, committed: int) -> None:
        """Record that the oldest step in flight committed ``committed`` of at most ``most`` positions."""
        if self.caught_up:
            self.caught_up -= 1
        else:
            self.lag -= most - committed

    def reached_root(self, in_flight: int) -> None:
        """Record that the draft has run up to the root, which lies behind all that the steps in flight commit."""
        self.lag, self.caught_up = 0, in_flight


# Conversion of a request's sampling parameters into the form that speculation applies (``SamplingParams``).


_COPIED_FIELDS = tuple(
    one.name
    for one in fields(SamplingParams)
    if one.name in Sampling.__struct_fields__ and one.name not in ("logit_bias", "min_tokens")
)
"""Fields of a request's message that are sampling parameters as they are."""


def sampling_params_of(submit: Submit, eos_token_ids: tuple[int, ...]) -> SamplingParams:
    """Return the sampling parameters of a request.

    As in vLLM, ``min_tokens`` blocks the model's end-of-text tokens even if ``ignore_eos`` makes them ordinary tokens.
    The masks of a guided request do so themselves: a grammar that allows no other token takes precedence.
    """
    sampling = submit.sampling
    guided = bool(sampling.grammar)
    bias: dict[int, float] = {}
    for token, value in sampling.logit_bias:
        bias[token] = bias.get(token, 0.0) + value
    return SamplingParams(
        **{name: getattr(sampling, name) for name in _COPIED_FIELDS},
        logit_bias=tuple(bias.items()),
        min_tokens=0 if guided else sampling.min_tokens,
        blocked=() if guided else blocked_tokens(submit, eos_token_ids),
        prompt_tokens=len(submit.prompt),
        guided=guided,
    )


def blocked_tokens(submit: Submit, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens that a request must not choose before ``min_tokens`` answer tokens."""
    sampling = submit.sampling
    return tuple(sorted({*sampling.stop_token_ids, *eos_token_ids})) if sampling.min_tokens else ()


def check_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError if a token id in logit_bias or stop_token_ids is outside of the vocabulary."""
    strange = [token for token, _ in params.logit_bias if not 0 <= token < vocab_size]
    strange += [token for token in params.blocked if not 0 <= token < vocab_size]
    if strange:
        raise ValueError(
            f"token ids {strange[:5]} in logit_bias or stop_token_ids are not the model's: they run from 0 to "
            f"{vocab_size - 1}"
        )


# Host state of one request.
#
# The device's copy of the request's length (step/device_state.py) can be one step ahead of the host's.


@dataclass(slots=True, eq=False)
class Request:
    """Queued or running request with its tokens, cache blocks, progress and counters.

    ``tokens`` holds the prompt and the emitted tokens. ``cached`` counts its keys in the target's cache according to
    the collected steps; steps in flight may add more.
    """

    submit: Submit
    sampling_params: SamplingParams
    finish_rule: FinishRule
    tokens: list[int]
    arrived_seconds: float
    order: int = 0
    """Position in the order of arrival, from 1."""
    expected_prefill: int = 0
    """Number of tokens to prefill, as expected when the request joined the queue."""
    last_turn: int = 0
    """Number of the last decoding turn. Requests take turns when a step has fewer tokens than decoding requests."""
    slot: int = -1
    """Index of the request's row in the device state; -1 while the request waits."""
    blocks: list[int] = field(default_factory=list)
    blocks_known: int = 0
    """Number of ``blocks`` already copied to the device's block table."""
    epoch: int = 0
    """Number of preemptions so far. Results of a step that was launched in an earlier epoch are discarded.

    A request that continues the output of another worker starts in epoch 1, as if it had been preempted there.
    """
    prefilled: int = 0
    """Number of tokens prefilled so far, including chunks in flight and the cached prefix."""
    prefill_end: int = 0
    """Number of tokens to prefill: those known at admission, i.e. the prompt and tokens emitted before a preemption."""
    prefix: int = 0
    """Number of tokens found in the prefix cache at admission. Their blocks may be shared and are never written."""
    cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache at the first admission."""
    imported: int = 0
    """Number of prompt tokens whose blocks another worker has computed for this request; they are not cached ones."""
    renews_prefix: bool | None = None
    """Whether a cached prefix that the draft cannot see is computed once more; None until one is found."""
    digests: list[bytes] = field(default_factory=list)
    """Digests of the first full blocks of ``tokens``, computed on demand."""
    digest_root: bytes = b""
    """Parent digest of the first block, from the salts of target and request; empty until a digest is needed."""
    published: int = 0
    """Number of leading blocks that other requests can find in the prefix index."""
    marked: int = 0
    """Number of leading blocks already examined for valid keys of the draft."""
    cached: int = 0
    in_flight: deque[int] = field(default_factory=deque)
    """Upper bound of the tokens that each launched and uncollected step commits, oldest step first."""
    draft: DraftProgress = field(default_factory=DraftProgress)
    merged: dict[str, DraftProgress] = field(default_factory=dict)
    """Progress of drafts that are merged with the request's own one, by name; those with a network have some."""
    proposers: tuple[str, ...] = ()
    """Names of the drafts that propose in the next step, if the request's task merges drafts."""
    emitted: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    last_emit_seconds: float = 0.0
    finish: FinishReason | None = None
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    """Logprobs of the prompt, gathered chunk by chunk and sent together with the first emitted token."""
    guide: Guide | None = None
    """Position in the grammar that the answer follows, behind ``tokens``; None without a grammar."""

    @classmethod
    def of(cls, submit: Submit, eos_token_ids: tuple[int, ...], *, arrived_seconds: float) -> Request:
        """Build a waiting request. ``arrived_seconds`` is its arrival on the monotonic clock.

        Raises:
            ValueError: The output of the earlier attempt is complete, so there is nothing to continue.
        """
        emitted = submit.emitted or ()
        request = cls(
            submit=submit,
            sampling_params=sampling_params_of(submit, eos_token_ids),
            finish_rule=FinishRule.of(submit.sampling, eos_token_ids),
            tokens=list(submit.prompt),
            arrived_seconds=arrived_seconds,
            epoch=1 if emitted else 0,
        )
        request.append_output(list(emitted))
        if request.finish is not None:
            raise ValueError(f"the {len(emitted)} tokens to continue are a complete answer")
        return request

    @property
    def id(self) -> str:
        """Request id that the server chose."""
        return self.submit.request_id

    @property
    def is_continued(self) -> bool:
        """True if the request continues an attempt on another worker, which counted its arrival."""
        return self.submit.emitted is not None

    @property
    def generated(self) -> int:
        """Number of output tokens that this worker emitted."""
        return self.emitted - len(self.submit.emitted or ())

    @property
    def decoding(self) -> bool:
        """True if the request runs and its whole prefill has been launched."""
        return self.slot >= 0 and self.prefilled == self.prefill_end

    @property
    def can_launch(self) -> bool:
        """True unless the next step of a guided request would need tokens of a step in flight for its masks."""
        return self.guide is None or not self.in_flight

    @property
    def cached_bound(self) -> int:
        """Upper bound of the keys in the target's cache after all launched steps."""
        return self.cached + sum(self.in_flight) if self.in_flight else self.cached

    @property
    def cached_min(self) -> int:
        """Lower bound of the keys in the target's cache after all launched steps; each commits at least one."""
        return self.cached + len(self.in_flight)

    @property
    def drafted(self) -> int:
        """End of the draft slots with valid keys; the valid range begins at the draft's ``start``.

        While steps in flight hide the exact progress of the draft, this is a lower bound.
        """
        return self.cached + 1 if self.draft.caught_up else self.cached_bound - self.draft.lag + 1

    def draft_backlog(self, first_slot: int, progress: DraftProgress) -> int:
        """Return an upper bound of the slots up to the root that a draft has not processed yet.

        Slots in the cached prefix are excluded, because its blocks may be shared and are never written.

        Args:
            first_slot: First slot of the draft's cache, 0 or 1.
            progress: Progress of the draft.
        """
        return min(progress.lag, self.cached_min + 1 - max(self.prefix, first_slot))

    def admit(self, slot: int, hit: CachedPrefix) -> None:
        """Start running in ``slot``, after the cached prefix ``hit``."""
        self.slot, self.blocks = slot, list(hit.blocks)
        self.published = self.marked = len(hit.blocks)
        self.prefix = self.prefilled = self.cached = len(hit.blocks) * BLOCK_SIZE
        self.prefill_end = len(self.tokens)
        self.draft.resume(self.prefix, hit.drafted * BLOCK_SIZE, has_state=hit.has_state)
        if self.epoch == 0:
            self.cached_tokens = max(self.prefix - self.imported, 0)

    def append_output(self, tokens: list[int]) -> list[int]:
        """Append newly emitted tokens up to the first stop token (included) or ``max_tokens`` and return them.

        Sets ``finish`` when the request ends.
        """
        emitted = self.emitted + len(tokens)
        if self.guide is None and self.finish is None and not self.finish_rule.may_finish(tokens, emitted):
            self.tokens += tokens
            self.emitted = emitted
            self._drop_blocks()
            return tokens
        taken = []
        for token in tokens:
            if self.finish is not None:
                break
            if not self._follow(token):
                self.finish = "error"
                break
            taken.append(token)
            self.emitted += 1
            self.finish = self.finish_rule.finish(token, self.emitted)
            if self.guide is not None and self.guide.ended:
                self.finish = "stop"
        self.tokens += taken
        self._drop_blocks()
        return taken

    def _drop_blocks(self) -> None:
        """Allow all tokens once ``min_tokens`` are emitted."""
        if self.sampling_params.blocks and self.emitted >= self.sampling_params.min_tokens:
            self.sampling_params = replace(self.sampling_params, min_tokens=0)

    def _follow(self, token: int) -> bool:
        """Move the guide, if there is one, behind a token. Return False if the grammar cannot be followed."""
        if self.guide is None:
            return True
        self.guide.advance((token,))
        return not self.guide.error

    def record_launch(self, max_tokens: int, *, drafts_follow: bool) -> None:
        """Record the launch of a step.

        Args:
            max_tokens: Upper bound of the positions that the step commits.
            drafts_follow: The drafts process these positions in the same step, as they do in prefill chunks.
        """
        self.in_flight.append(max_tokens)
        unprocessed = 0 if drafts_follow else max_tokens
        self.draft.record_launch(unprocessed)
        for name in self.merged:
            self.merged[name].record_launch(unprocessed)

    def advance(self, max_tokens: int, committed: int) -> None:
        """Record that the oldest step in flight was collected.

        Args:
            max_tokens: Upper bound of the positions that the step could commit, as given at launch.
            committed: Positions that it committed.
        """
        oldest = self.in_flight.popleft()
        assert oldest == max_tokens, "steps are collected in the order of their launch"
        self.cached += committed
        self.draft.record_collect(max_tokens, committed)
        for name in self.merged:
            self.merged[name].record_collect(max_tokens, committed)

    def forget_cache(self) -> None:
        """Reset the cache state for a return to the queue; all tokens known so far will be prefilled again."""
        self.slot, self.blocks, self.blocks_known = -1, [], 0
        self.prefilled = self.prefill_end = self.cached = self.prefix = 0
        self.published = self.marked = 0
        self.in_flight.clear()
        self.prompt_logprobs.clear()
        self.draft = DraftProgress(self.draft.draft)
        self.merged.clear()
        self.epoch += 1
