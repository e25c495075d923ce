"""Requests of the engine: their state, and the batch of a step with the tree that each of its rows verifies."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from specdecode_worker.contract import TreeShape
from specdecode_worker.core.kv_cache import BLOCK_SIZE, CachedPrefix
from specdecode_worker.core.messages import FinishReason, Logprobs, Submit
from specdecode_worker.guided.guide import Guide
from specdecode_worker.sampling.params import FinishRule, SamplingParams
from specdecode_worker.sampling.trees import PLAIN, Tree, given_chain

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


# Sampling parameters of a request as its steps apply them (``SamplingParams``).


def sampling_params_of(submit: Submit, eos_token_ids: tuple[int, ...]) -> SamplingParams:
    """Return the sampling parameters of a request.

    As in vLLM, ``min_tokens`` blocks the model's end-of-text tokens even if ``ignore_eos`` makes them ordinary tokens.
    The masks of a guided request do so themselves: a grammar that allows no other token takes precedence.
    """
    bias: dict[int, float] = {}
    for token, value in submit.sampling.logit_bias:
        bias[token] = bias.get(token, 0.0) + value
    return SamplingParams(
        **structs.asdict(submit.sampling) | {"logit_bias": tuple(bias.items())},
        blocked=() if submit.sampling.grammar else blocked_tokens(submit, eos_token_ids),
        prompt_tokens=len(submit.prompt),
    )


def blocked_tokens(submit: Submit, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens that a request must not choose before ``min_tokens`` answer tokens."""
    sampling = submit.sampling
    return tuple(sorted({*sampling.stop_token_ids, *eos_token_ids})) if sampling.min_tokens else ()


def check_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError if a token id of the parameters is outside of the vocabulary."""
    tokens = (*(token for token, _ in params.logit_bias), *params.allowed_token_ids, *params.blocked)
    if strange := [token for token in tokens if not 0 <= token < vocab_size]:
        raise ValueError(
            f"token ids {strange[:5]} in logit_bias, allowed_token_ids or stop_token_ids are not the model's: they run "
            f"from 0 to {vocab_size - 1}"
        )


# Host state of one request.
#
# The device's copy of the request's length (`core/device_state.py`) can be one step ahead of the host's.


@dataclass(slots=True, eq=False, weakref_slot=True)
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
    """Names of the drafts that propose in the next step, if some task merges drafts."""
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
            if self.guide is not None:
                self.guide.advance((token,))
                if self.guide.error:
                    self.finish = "error"
                    break
            taken.append(token)
            self.emitted += 1
            self.finish = self.finish_rule.finish(token, self.emitted)
        self.tokens += taken
        self._drop_blocks()
        return taken

    def _drop_blocks(self) -> None:
        """Allow all tokens once ``min_tokens`` are emitted."""
        if self.sampling_params.blocks and self.emitted >= self.sampling_params.min_tokens:
            self.sampling_params = structs.replace(self.sampling_params, min_tokens=0)

    def record_launch(self, max_tokens: int, *, drafts_follow: bool) -> None:
        """Record the launch of a step.

        Args:
            max_tokens: Upper bound of the positions that the step commits.
            drafts_follow: The drafts process these positions in the same step, as they do in prefill chunks.
        """
        self.in_flight.append(max_tokens)
        unprocessed = 0 if drafts_follow else max_tokens
        self.draft.record_launch(unprocessed)
        for progress in self.merged.values():
            progress.record_launch(unprocessed)

    def advance(self, committed: int) -> None:
        """Record that the oldest step in flight was collected, which committed so many positions."""
        max_tokens = self.in_flight.popleft()
        self.cached += committed
        self.draft.record_collect(max_tokens, committed)
        for progress in self.merged.values():
            progress.record_collect(max_tokens, committed)

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


# Shapes and trees of a step, as they are selected (engine/engine.py).


@dataclass(frozen=True, slots=True)
class Choice:
    """Shapes selected for one step."""

    sequences: int = 0
    """Number of decoding requests."""
    concurrency: int = 0
    """Index of the concurrency bucket."""
    context: int = 0
    """Index of the context bucket of the longest request."""
    shape: TreeShape | None = None
    """Common shape of all requests; None if shapes differ or some request had no draft ready for it."""
    explores: bool = False
    """True if the step belongs to an exploration burst or a probe of the guard."""
    counted: bool = True
    """True if the measured time counts; False for the warm-up steps of a burst."""
    shadow_passes: int = 0
    """Number of draft passes beyond the shape; their tokens are scored but not verified."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Trees of the decoding requests of one step, in their order, and the choice that they follow."""

    trees: Sequence[Tree] = ()
    choice: Choice = Choice()


# Rows of a step.


@dataclass(slots=True)
class Row:
    """Part of one request in a step: ``count`` packed tokens, either a prefill chunk or the nodes of a draft tree.

    A chunk begins at position ``start``, which is -1 for a tree. ``emits`` is False for a chunk that does not end
    its prompt: such a row emits no token. A row is never changed; a frozen class would take 1 us more to create.
    """

    request: Request
    count: int
    tree: Tree = PLAIN
    start: int = -1
    emits: bool = True

    @property
    def is_chunk(self) -> bool:
        """True if the row is a prefill chunk."""
        return self.start >= 0

    @property
    def is_first_chunk(self) -> bool:
        """True if the row is the first chunk since the request was admitted."""
        return self.is_chunk and self.start == self.request.prefix

    @property
    def max_committed(self) -> int:
        """Upper bound of the positions that the step commits to the cache for this row."""
        return self.count if self.start >= 0 else self.tree.depth + 1


def decoding_rows(rows: Sequence[Row]) -> int:
    """Return the number of decoding rows of a batch. Its prefill chunks are behind them."""
    decoding = len(rows)
    while decoding and rows[decoding - 1].is_chunk:
        decoding -= 1
    return decoding


# Draft trees of guided requests: chains of tokens that the grammar forces, which need no draft pass.


def with_forced_tokens(selection: Selection, requests: Sequence[Request]) -> Selection:
    """Return ``selection`` with a chain of forced tokens for each guided request that has enough of them.

    A chain replaces a drafted tree that is not deeper: the same tokens then cost no draft pass. A deeper tree stays,
    since its draft proposes forced tokens too. A step with such a chain is no evidence about the planned shape.
    """
    trees = [_tree(tree, request) for tree, request in zip(selection.trees, requests, strict=True)]
    if not any(tree.given for tree in trees):
        return selection
    return Selection(trees, replace(selection.choice, shape=None, shadow_passes=0))


def given_tokens(request: Request, tree: Tree) -> tuple[int, ...]:
    """Return the tokens of a tree with given tokens; empty for any other tree."""
    if not tree.given or request.guide is None:
        return ()
    return request.guide.forced()[: tree.verified - 1]


def _tree(tree: Tree, request: Request) -> Tree:
    guide, room = request.guide, request.submit.sampling.max_tokens - request.emitted - 1
    if guide is None or room <= 0:
        return tree
    forced = len(guide.forced()[:room])
    return given_chain(forced) if forced and forced >= tree.depth else tree
