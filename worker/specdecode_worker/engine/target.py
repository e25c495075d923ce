"""Passes of the target over the rows of a step, the step in flight, its time, and log-probabilities of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from random import Random

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import OTHER_TASK, SyntheticKnobs
from specdecode_worker.core.device_state import (
    DeviceState,
    HostCopy,
    PackedBatch,
    PackedTensors,
    PagedCache,
    slots_of,
    spread,
    to_host,
)
from specdecode_worker.core.kv_cache import BLOCK_SIZE
from specdecode_worker.core.messages import Logprobs
from specdecode_worker.core.request import Choice, Row, decoding_rows
from specdecode_worker.drafts.registry import OwnRanks
from specdecode_worker.engine.scheduler import Scheduler
from specdecode_worker.engine.stats import RowResult, Statistics, StepSize
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.sampling.trees import Forest, Nodes

# Forward pass of the target over a batch of rows: packing, forward, and logits where a token is chosen.


@dataclass(frozen=True, slots=True)
class TargetPass:
    """Packed batch on the device, with R rows of logits."""

    packed: PackedBatch
    logit_rows_R: Tensor
    """Index of the packed token behind each row of logits."""
    nodes: Nodes
    """Row of the batch, tree node and its depth of each row of logits."""


class Target:
    """Target network with its paged cache."""

    def __init__(self, model: CausalLM, cache: PagedCache, state: DeviceState) -> None:
        self.cache = cache
        self.form: str = model.form
        """Format of the target's matrices; empty for that of activations."""
        self.layers = model.config.num_hidden_layers
        self.vocab_size = model.config.vocab_size
        self.last_position = model.config.max_position_embeddings - 1
        """Last position that the rotary embedding supports."""
        self._model, self._state = model, state

    def close(self) -> None:
        """Release resources outside of the device; there are none unless a subclass adds other ranks."""

    def within_chunk(self, depth_limit_B: Tensor, roots_B: Tensor) -> Tensor:
        """Return the accepted depths of trees [B], cut where a chunk of attention ends.

        Nodes behind the end of the root's chunk saw keys that they must not see. A cut emits fewer tokens, never
        others.
        """
        chunk = self._model.config.attention_chunk_size
        return torch.minimum(depth_limit_B, chunk - 1 - roots_B % chunk) if chunk else depth_limit_B

    def forward(self, step: TargetPass, reads: TargetStates) -> tuple[Tensor, Tensor | None, Tensor]:
        """Run the target over a packed batch.

        Args:
            step: Batch from ``pack``.
            reads: Hidden states that the drafts read.

        Returns:
            Logits [R, V], the states that drafts read [T, A] (None if they read none), and the last hidden states
            [T, E].
        """
        return self.run(self._model, self.cache, step.packed, step.logit_rows_R, reads)

    def forward_tables(
        self, tables: PackedTensors, slots_B: Tensor, reads: TargetStates
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits [T, V] and the drafts' states [T, A] of every token without synchronizing with the host.

        CUDA graph capture relies on this. ``slots_B`` are the slots of the sequences in the device state, by which the
        other ranks of a replica know their blocks.
        """
        logits_TV, aux_TA, _ = self.run(self._model, self.cache, tables, tables.tokens_T, reads)
        return logits_TV, aux_TA

    def keep_tables(self, source_BD: Tensor, target_BD: Tensor) -> None:
        """Move the keys and values of accepted nodes, at most D of each sequence, in a captured step."""
        self.cache.keep(source_BD.flatten(), target_BD.flatten(), group=source_BD.shape[1])

    @staticmethod
    def run(
        model: CausalLM,
        cache: PagedCache,
        packed: PackedBatch | PackedTensors,
        logit_rows_R: Tensor,
        reads: TargetStates,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Run one pass of ``model`` over ``cache``; returns as ``forward``.

        Static so that the other ranks of a replica can run it with their shard of the model and the cache.
        """
        out = model(packed.tokens_T, packed.positions_T, cache.attend(packed), reads)
        hidden = out.hidden_TE
        if len(logit_rows_R) != len(hidden):
            hidden = hidden[logit_rows_R]
        return model.logits(hidden) if len(hidden) else hidden, out.aux_TA, out.hidden_TE

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Return the logits [T, V] of last hidden states [T, E]."""
        logits_TV: Tensor = self._model.logits(hidden_TE)
        return logits_TV

    def pack(self, rows: Sequence[Row]) -> TargetPass:
        """Pack the rows of a batch into one pass.

        All tokens are read from the device state by slot and index: those of a chunk at their positions in the prompt,
        those of a tree at the indices from the root on.
        """
        state, device = self._state, self._state.length_S.device
        counts = tuple(row.count for row in rows)
        slots_B = to_device([row.request.slot for row in rows], device)
        sequence_T, row_T = spread(counts, device)
        length_B = state.length_S[slots_B]
        index_T = length_B[sequence_T] + row_T
        depth_T, ancestors_T = _topology(rows, device)
        table_BM = state.block_table_SM[slots_B]
        packed = PackedBatch(
            tokens_T=state.tokens_SP[slots_B[sequence_T], index_T],
            positions_T=(length_B[sequence_T] + depth_T).clamp(max=self.last_position),
            slots_T=slots_of(table_BM, sequence_T, index_T),
            prefix_len_B=length_B,
            ancestors_T=ancestors_T,
            block_table_BM=table_BM,
            blocks=tuple(tuple(row.request.blocks) for row in rows),
            query_counts=counts,
            key_bounds=tuple(row.request.cached_bound + row.count for row in rows),
            key_starts=(0,) * len(rows),
            dense=all(row.count == 1 and not row.request.in_flight for row in rows),
            chunk_keys=tuple(row.start + row.count if row.is_chunk else 0 for row in rows),
        )
        return TargetPass(packed, *_logit_rows(rows, device))


def _topology(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each packed token's position relative to its sequence's length [T] and its ancestor mask [T].

    The tokens of a chunk are consecutive, with the mask 0 for causal attention.
    """
    depths: list[int] = []
    ancestors: list[int] = []
    for row in rows:
        if row.is_chunk:
            depths += range(row.count)
            ancestors += [0] * row.count
        else:
            depths += row.tree.depths[: row.count]
            ancestors += row.tree.ancestors[: row.count]
    depth_T, ancestors_T = to_device([depths, ancestors], device)
    return depth_T, ancestors_T


def _logit_rows(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Nodes]:
    """Return ``logit_rows_R`` and ``nodes`` of ``TargetPass``."""
    logit_rows: list[tuple[int, int, int, int]] = []
    begin = 0
    for b, row in enumerate(rows):
        if row.is_chunk and row.emits:
            logit_rows.append((begin + row.count - 1, b, 0, 0))
        elif row.emits:
            logit_rows += [(begin + node, b, node, row.tree.depths[node]) for node in range(row.count)]
        begin += row.count
    logit_rows_R, *nodes = to_device(logit_rows, device, dtype=torch.int64).reshape(-1, 4).unbind(1)
    return logit_rows_R, Nodes(*nodes)


# Transfer of request state to the device before a step, and commit of prompt chunks after it.


def upload_rows(state: DeviceState, rows: Sequence[Row]) -> None:
    """Copy the tokens and prefixes of newly admitted requests and all newly taken blocks to the device state."""
    slots: list[int] = []
    columns: list[int] = []
    blocks: list[int] = []
    for row in rows[decoding_rows(rows) :]:
        if row.is_first_chunk:
            request = row.request
            state.admit(request.slot, request.tokens, request.blocks[: request.prefix // BLOCK_SIZE])
    for row in rows:
        request = row.request
        known, owned = request.blocks_known, len(request.blocks)
        if known < owned:
            slots += [request.slot] * (owned - known)
            columns += range(known, owned)
            blocks += request.blocks[known:]
            request.blocks_known = owned
    if blocks:
        state.set_blocks(slots, columns, blocks)


def commit_chunks(state: DeviceState, rows: Sequence[Row], step: TargetPass, aux_TA: Tensor | None) -> None:
    """Commit prefill chunks: advance their lengths and store their last auxiliary states for the draft.

    The keys of a chunk are already at their final slots.
    """
    for begin, row in zip(step.packed.query_start, rows, strict=False):
        if row.is_chunk:
            end = row.start + row.count
            state.set_length(row.request.slot, end)
            if aux_TA is not None:
                aux = aux_TA[begin : begin + row.count]
                state.store_last_aux(row.request.slot, row.request.blocks, end, aux)


# Step in flight, the measurement of its time, and log-probabilities of its tokens.

# Handle of a step that was queued on the device, with all that is needed to read its results.


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRows:
    """Results of rows that were queued together, as one graph or in one eager pass."""

    rows: tuple[Row, ...]
    """Rows of the pass. The first ones, as many as ``outcome_BC`` has, chose a token."""
    outcome_BC: Tensor | None = None
    """Result of verification, as `Committed.out`, on the host after ``host_copy``; None if no row chose a token."""
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
        if not results:  # else steps of chunks alone queue up, and take no longer than their launches
            self.parts[-1].host_copy.wait()
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


# Logprobs of emitted tokens and of prompt tokens, for requests that ask for them.
#
# They are computed from the target's raw logits, before any logits processor (vLLM's ``raw_logprobs``), and copied to
# the host after the pass. The logits of a node equal those of plain decoding, so speculation changes no logprobs.

ROWS_AT_ONCE = 64
"""Rows of logits processed at a time, which bounds the memory of the fp32 copies."""
LEAST_TOP = 20
"""Fewest top tokens that are computed. With ties, the number of top tokens would otherwise affect their choice."""


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Logprobs of several rows of a step, one row after the other; on the host after ``host_copy``.

    ``tops`` is the number of top tokens that each row requested, by row, and ``counts`` its number of tokens, in the
    same order. All rows together have T tokens, with their ranks from 1 and the K most likely tokens at each position.
    """

    tops: Mapping[int, int]
    counts: Sequence[int]
    tokens_T: Tensor
    logprob_T: Tensor
    rank_T: Tensor
    top_tokens_TK: Tensor
    top_logprobs_TK: Tensor
    host_copy: HostCopy

    def read(self) -> dict[int, list[Logprobs]]:
        """Wait for the copies and return the logprobs by row of the step."""
        self.host_copy.wait()
        columns = (self.tokens_T, self.logprob_T, self.rank_T, self.top_tokens_TK, self.top_logprobs_TK)
        tokens = zip(*(column.tolist() for column in columns), strict=True)
        return {
            row: [
                Logprobs(token, logprob, rank, tuple(best[:top]), tuple(logprobs[:top]))
                for token, logprob, rank, best, logprobs in islice(tokens, count)
            ]
            for (row, top), count in zip(self.tops.items(), self.counts, strict=True)
        }


def requested_logprobs(rows: Sequence[Row]) -> dict[int, int]:
    """Return the number of top tokens that rows requested with their logprobs, by row; only of those that did."""
    return {b: top for b, row in enumerate(rows) if (top := row.request.submit.sampling.logprobs) is not None}


def gather_output_logprobs(
    emitting: Sequence[Row], forest: Forest, logits_RV: Tensor, out: Tensor
) -> RowLogprobs | None:
    """Queue the logprobs of emitted tokens for the rows that request them; None if no row does.

    Covers the accepted path and the bonus token. Entries after these are padding for the reader to cut off.

    Args:
        emitting: Rows that choose a token.
        forest: Their trees.
        logits_RV: Logits of their nodes, [rows, vocabulary].
        out: Result of verification, as `Committed.out`.
    """
    if not (tops := requested_logprobs(emitting)):
        return None
    depth = forest.depth
    first = list(accumulate((tree.verified for tree in forest.trees), initial=0))
    asked_A = to_device(list(tops), logits_RV.device)
    first_A1 = to_device([[first[b]] for b in tops], logits_RV.device)
    asked_AC = out[asked_A]
    rows_T = (first_A1 + nodes_of(asked_AC, depth)).flatten()
    emitted_AD = asked_AC[:, : depth + 1].clamp(min=0)
    counts = [depth + 1] * len(tops)
    return _queue_logprobs(tops, counts, lambda rows: logits_RV[rows], rows_T, emitted_AD.flatten())


def nodes_of(out_BC: Tensor, depth: int) -> Tensor:
    """Return the root and the accepted nodes [B, D + 1] of results like `Committed.out`, padded with the root."""
    return torch.nn.functional.pad(out_BC[:, depth + 1 : 2 * depth + 1].clamp(min=0), (1, 0))


def gather_prompt_logprobs(
    logits_of: Callable[[Tensor], Tensor], rows: Sequence[Row], query_start: Sequence[int], hidden_TE: Tensor
) -> RowLogprobs | None:
    """Queue the logprobs of prompt tokens for the prefill chunks of requests that ask for them; None if none does.

    A chunk yields the logprobs of the prompt tokens that directly follow its positions. Requests that already emitted a
    token, i.e. prefill again after a preemption, are skipped.

    Args:
        logits_of: Function from hidden states [T, E] to logits [T, V].
        rows: Rows of the step.
        query_start: Index of each row's first packed token.
        hidden_TE: Last hidden states of all packed tokens.
    """
    tops: dict[int, int] = {}
    places: list[int] = []
    tokens: list[list[int]] = []
    for index, (row, begin) in enumerate(zip(rows, query_start, strict=False)):
        top, request = row.request.submit.sampling.prompt_logprobs, row.request
        if top is None or not row.is_chunk or request.emitted:
            continue
        end = min(row.start + row.count, len(request.submit.prompt) - 1)
        tops[index] = top
        tokens.append(request.tokens[row.start + 1 : end + 1])
        places += range(begin, begin + len(tokens[-1]))
    if not places:
        return None
    wanted_T = to_device([token for chunk in tokens for token in chunk], hidden_TE.device)
    places_T = to_device(places, hidden_TE.device)
    counts = [len(chunk) for chunk in tokens]
    return _queue_logprobs(tops, counts, lambda at: logits_of(hidden_TE[at]), places_T, wanted_T)


def _queue_logprobs(
    tops: Mapping[int, int],
    counts: Sequence[int],
    logits_of: Callable[[Tensor], Tensor],
    rows_T: Tensor,
    tokens_T: Tensor,
) -> RowLogprobs:
    """Queue the logprobs of ``tokens_T`` under the logits of ``rows_T``, in pieces of bounded size."""
    pieces, top = [], max(*tops.values(), LEAST_TOP)
    for start in range(0, len(rows_T), ROWS_AT_ONCE):
        here = slice(start, start + ROWS_AT_ONCE)
        pieces.append(logprobs_of(logits_of(rows_T[here]), tokens_T[here], top))
    columns = [torch.cat(column) for column in zip(*pieces, strict=True)]
    (tokens, logprob, rank, top_tokens, top_logprobs), host_copy = to_host([tokens_T, *columns])
    return RowLogprobs(tops, counts, tokens, logprob, rank, top_tokens, top_logprobs, host_copy)


def logprobs_of(logits_TV: Tensor, tokens_T: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logprob [T], rank [T], top tokens [T, K] and their logprobs [T, K], computed in fp32 or wider."""
    wide_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    logp_TV = torch.log_softmax(wide_TV, dim=-1)
    own_T1 = tokens_T[:, None]
    rank_T = (wide_TV > wide_TV.gather(1, own_T1)).sum(-1) + 1
    best = logp_TV.topk(min(top, logp_TV.shape[1]), dim=-1)
    return logp_TV.gather(1, own_T1)[:, 0], rank_T, best.indices, best.values


# Synthetic test knobs that shorten accepted paths and lengthen steps, to test the control loop on small machines.


class Synthetic:
    """Application of the synthetic knobs of a worker.

    Tokens beyond a cut are emitted again by later steps, so the text stays the same.
    """

    def __init__(self, knobs: SyntheticKnobs | None = None, seed: int = 0) -> None:
        self.knobs = knobs
        self._random = Random(seed)

    @property
    def cuts(self) -> bool:
        """True if an acceptance profile is set."""
        if self.knobs is None:
            return False
        return any(knobs.acceptance or knobs.task_acceptance for knobs in (self.knobs, *self.knobs.by_draft.values()))

    def draw_depth_limit(self, depth: int, task: str = OTHER_TASK, draft: str = "") -> int:
        """Draw the largest depth to which a path of ``depth`` may be accepted.

        Each depth is accepted with the probability in the profile of the task; the first failure ends the path.

        Args:
            depth: Drafted depth of the path.
            task: Task of the request.
            draft: Hash of the draft that the request runs.
        """
        knobs = self._of(draft)
        profile = knobs and knobs.task_acceptance.get(task, knobs.acceptance)
        if not profile:
            return depth
        for level in range(depth):
            if self._random.random() >= profile[min(level, len(profile) - 1)]:
                return level
        return depth

    def least_seconds(self, sequences: int, nodes: int, context: int, drafts: Iterable[str] = ("",)) -> float:
        """Return the minimum duration of a step of this size in seconds, 0 if no row of the knobs covers it.

        Of several ``drafts`` in one step, given by their hashes, the slowest counts.
        """
        times = (self._step_seconds(self._of(draft), sequences, nodes, context) for draft in set(drafts))
        return max(times, default=0.0)

    def _of(self, draft: str) -> SyntheticKnobs | None:
        return self.knobs and self.knobs.by_draft.get(draft, self.knobs)

    @staticmethod
    def _step_seconds(knobs: SyntheticKnobs | None, sequences: int, nodes: int, context: int) -> float:
        for row in (knobs and knobs.step_time) or ():
            if sequences <= row.max_sequences and nodes <= row.max_nodes and context <= row.max_context:
                return row.seconds
        return 0.0
