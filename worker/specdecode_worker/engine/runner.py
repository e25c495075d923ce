"""Device work of one step: draft, verify in one target pass, accept and commit, all queued without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from specdecode_kernels.transfer import to_device
from specdecode_worker.core.batch import Choice, Row, given_tokens
from specdecode_worker.core.device_state import DeviceState, to_host
from specdecode_worker.drafts.registry import DraftRegistry, Proposed
from specdecode_worker.engine.captured_step import Proposals, UncapturedStep
from specdecode_worker.engine.cuda_graphs import ReadyStep, StepGraphs
from specdecode_worker.engine.stats import PhaseTimer, step_size_of
from specdecode_worker.engine.step_tables import HostMasks
from specdecode_worker.engine.target import (
    LaunchedStep,
    QueuedRows,
    Synthetic,
    Target,
    commit_chunks,
    gather_output_logprobs,
    gather_prompt_logprobs,
    upload_rows,
)
from specdecode_worker.sampling.sampler import TokenMasks
from specdecode_worker.sampling.trees import Forest


class StepLauncher:
    """Launcher of steps: turns the rows of a batch into a queued step. It keeps no state of requests."""

    def __init__(
        self,
        target: Target,
        drafts: DraftRegistry,
        state: DeviceState,
        phases: PhaseTimer,
        graphs: StepGraphs | None = None,
        *,
        coupled: bool = True,
    ) -> None:
        """Connect the parts.

        ``graphs`` holds captured CUDA graphs; without it no step is captured. ``coupled`` is False for the sampler
        ``mss``.
        """
        self._target, self._drafts, self._state = target, drafts, state
        self._phases, self._graphs, self._coupled = phases, graphs, coupled
        self.synthetic = Synthetic()

    def launch(
        self, rows: tuple[Row, ...], choice: Choice, *, began_seconds: float, draft_prefill: bool
    ) -> LaunchedStep:
        """Queue one step and return its handle without waiting for the device.

        Args:
            rows: Rows of the batch; those that choose a token come first.
            choice: Selected shapes, kept for the statistics.
            began_seconds: Monotonic clock at the start of the step.
            draft_prefill: Drafts process prefill chunks too, because the plan can lead to drafting.
        """
        upload_rows(self._state, rows)
        depth_limits = self._depth_limits(rows)
        ready = self._graphs.plan(rows) if self._graphs is not None else None
        decoding = 0 if ready is None else ready.decoding
        parts = [] if ready is None else [self._replay(ready, rows, choice, depth_limits)]
        if decoding < len(rows):
            # Behind the graph, so that the device is busy while the host queues these calls one by one.
            parts.append(self._run(rows[decoding:], choice, depth_limits[decoding:], draft_prefill=draft_prefill))
        passes = self._drafts.proposals.passes(rows, [row.tree.drafted_depth for row in rows])
        return LaunchedStep(
            rows=rows,
            parts=tuple(parts),
            epochs=tuple([row.request.epoch for row in rows]),
            choice=choice,
            size=step_size_of(rows, passes),
            shadow_passes=self._shadow_passes(rows, choice, passes),
            depth_limits=depth_limits,
            began_seconds=began_seconds,
        )

    def _depth_limits(self, rows: tuple[Row, ...]) -> tuple[int, ...]:
        """Return the largest accepted depth of each row that chooses a token, which synthetic knobs may limit."""
        knobs = self.synthetic
        if not knobs.cuts:
            return tuple([row.tree.drafted_depth for row in rows if row.emits])
        return tuple(
            knobs.draw_depth_limit(row.tree.drafted_depth, row.request.submit.task, row.request.draft.draft)
            for row in rows
            if row.emits
        )

    def _shadow_passes(self, rows: tuple[Row, ...], choice: Choice, passes: int) -> int:
        """Return the number of the step's ``passes`` that verified nodes do not need."""
        if not choice.shadow_passes:
            return 0
        depths = [min(row.tree.depth, row.tree.drafted_depth) for row in rows]
        return passes - self._drafts.proposals.passes(rows, depths)

    def _replay(
        self, ready: ReadyStep, rows: tuple[Row, ...], choice: Choice, depth_limits: tuple[int, ...]
    ) -> QueuedRows:
        """Queue decoding rows as one captured CUDA graph, behind the passes of drafts that the graph does not have."""
        assert self._graphs is not None, "a planned step has graphs"
        proposals = None
        if ready.plan.outside is not None:
            proposals = replace(self._propose(rows[: ready.decoding]), seconds=self._phases.lap("draft"))
        elif ready.plan.key.features.masks:
            proposals = self._masked(ready, rows[: ready.decoding])
            self._phases.lap("draft")
        cuts = depth_limits[: ready.decoding] if self.synthetic.cuts else None
        done = self._graphs.replay(ready, rows, cuts, ranked=choice.shadow_passes > 0, proposals=proposals)
        self._phases.lap("verify")
        return done

    def _propose(self, rows: tuple[Row, ...]) -> Proposals:
        """Run the drafts of decoding rows before a graph verifies, and compute the masks of rows with a grammar."""
        step = self._step_of(rows)
        self._write_given_tokens(rows)
        proposed = self._drafts.proposals.propose(rows, step.forest, step.sampler)
        own = proposed.own.on_host() if proposed.own is not None else None
        masks = None if step.masks is None else _verified_masks(step.masks, step.forest)
        return Proposals(proposed.ranked_BNK, own, masks)

    def _masked(self, ready: ReadyStep, rows: tuple[Row, ...]) -> Proposals:
        """Run the graph of the draft passes, if there are any, and compute the masks of rows with a grammar.

        The drafts propose under the masks of the roots alone.
        """
        assert self._graphs is not None, "a planned step has graphs"
        step = self._step_of(rows)
        masks, forest = step.masks, step.forest
        assert masks is not None, "a row has a grammar"
        self._write_given_tokens(rows)
        proposals = Proposals()
        if ready.drafts is not None:
            proposals = self._graphs.replay_drafts(ready, rows, _packed_masks(*masks.of_roots(), forest))
        return replace(proposals, masks=_verified_masks(masks, forest))

    def _run(
        self, rows: tuple[Row, ...], choice: Choice, depth_limits: tuple[int, ...], *, draft_prefill: bool
    ) -> QueuedRows:
        """Queue rows without a graph, in one pass of the target."""
        phases = self._phases
        emitting = [row for row in rows if row.emits]
        cuts, proposed = depth_limits if self.synthetic.cuts else None, Proposed()
        step = self._step_of(emitting, cuts) if emitting else None
        self._write_given_tokens(emitting)
        phases.lap("bookkeeping")
        if step is not None:
            proposed = self._drafts.proposals.propose(emitting, step.forest, step.sampler)
            if step.masks is not None:
                step.masks.load_tokens()
        ranked_BNK = proposed.ranked_BNK
        draft_seconds = phases.lap("draft")
        target_pass = self._target.pack(rows)
        phases.lap("bookkeeping")
        logits_RV, aux_TA, hidden_TE = self._target.forward(target_pass, self._drafts.reads)
        phases.lap("verify")
        out, output_logprobs, results = None, None, []
        if step is not None:
            if step.masks is not None:
                step.masks.prepare()
            out = step.verify(target_pass, logits_RV, ranked_BNK)
            output_logprobs = gather_output_logprobs(emitting, step.forest, logits_RV, out)
            results = [out] if ranked_BNK is None or not choice.shadow_passes else [out, ranked_BNK]
        prompt_logprobs = gather_prompt_logprobs(self._target.logits, rows, target_pass.packed.query_start, hidden_TE)
        # The copies to the host are queued before the draft's prefill, which would otherwise delay the first token.
        copies, host_copy = to_host(results)
        phases.lap("sample")
        chunks = [row for row in rows if row.is_chunk]
        if chunks and draft_prefill:
            # Before the states are stored: for the first position of a chunk, drafts read that of the position before
            # from the ring, which the states of the chunk overwrite.
            self._drafts.prefill(chunks, None if aux_TA is None else aux_TA[-sum(row.count for row in chunks) :])
        commit_chunks(self._state, rows, target_pass, aux_TA)
        if step is not None and out is not None and aux_TA is not None:
            step.store_states(target_pass, aux_TA, out)
        phases.lap("bookkeeping")
        return QueuedRows(
            rows=rows,
            outcome_BC=copies[0] if copies else None,
            ranked_BNK=copies[1] if len(copies) > 1 else None,
            host_copy=host_copy,
            output_logprobs=output_logprobs,
            prompt_logprobs=prompt_logprobs,
            own_ranks=proposed.own.on_host() if proposed.own is not None else None,
            draft_seconds=draft_seconds,
        )

    def _step_of(self, rows: Sequence[Row], depth_limits: Sequence[int] | None = None) -> UncapturedStep:
        return UncapturedStep(rows, self._target, self._state, coupled=self._coupled, depth_limits=depth_limits)

    @property
    def _device(self) -> torch.device:
        return self._state.length_S.device

    def _write_given_tokens(self, emitting: Sequence[Row]) -> None:
        """Write the tokens of trees that are not drafted behind the roots of their rows."""
        tokens_SP, length_S = self._state.tokens_SP, self._state.length_S
        for row in emitting:
            if tokens := given_tokens(row.request, row.tree):
                slot = row.request.slot
                index_N = length_S[slot] + 1 + torch.arange(len(tokens), device=self._device)
                tokens_SP[slot, index_N] = to_device(list(tokens), self._device, dtype=torch.int64)


def _verified_masks(masks: TokenMasks, forest: Forest) -> HostMasks:
    """Wait for the drafted tokens of rows with a grammar, and return the masks of all verified nodes."""
    masks.load_tokens()
    return _packed_masks(*masks.verified(), forest)


def _packed_masks(rows_BN: NDArray[np.int64], table_NW: NDArray[np.uint32], forest: Forest) -> HostMasks:
    """Return the masks of nodes as those of packed tokens."""
    packed = [row for tree, nodes in zip(forest.trees, rows_BN.tolist(), strict=True) for row in nodes[: tree.verified]]
    return HostMasks(packed, table_NW)
