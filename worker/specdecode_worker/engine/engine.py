"""Engine that turns requests into tokens, one batched step at a time.

The engine works on token ids only; text, sockets and processes are handled by its callers.

``launch`` queues a step on the device without waiting; ``collect`` reads its results. On an accelerator step n + 1 is
launched before step n is collected, so the device never waits for the host. On a CPU, which runs synchronously, step n
is collected first: a request that ended in step n then takes no part in step n + 1.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import (
    DraftState,
    GuardCell,
    Plan,
    PlanState,
    Report,
    SyntheticKnobs,
    TreeShape,
    TrialState,
)
from specdecode_worker.control.plan import (
    DROPPED_STEPS,
    Dispatcher,
    Exploration,
    Guard,
    Load,
    PlainStepTimes,
    changed_loads,
)
from specdecode_worker.core.device_state import DeviceState, HostCopy, to_host
from specdecode_worker.core.messages import Logprobs, Submit, Tokens
from specdecode_worker.core.request import (
    Choice,
    Request,
    Row,
    Selection,
    check_tokens,
    decoding_rows,
    given_tokens,
    with_forced_tokens,
)
from specdecode_worker.drafts.base import DEFAULT_DRAFT, LoadDraft, LoadedDraft
from specdecode_worker.drafts.registry import NO_SWAPS, DraftRegistry, Proposals
from specdecode_worker.drafts.swap import BlockCosts, SwapStatus, describe_failure
from specdecode_worker.engine.captured_step import UncapturedStep
from specdecode_worker.engine.cuda_graphs import ReadyStep, StepGraphs
from specdecode_worker.engine.remote_prefill import BlockExchange
from specdecode_worker.engine.scheduler import Counters, Deadlines, GrammarQueue, Scheduler
from specdecode_worker.engine.stats import (
    PhaseTimer,
    RowResult,
    Statistics,
    StepCosts,
    StepRecorder,
    WorkerIdentity,
    build_report,
    step_size_of,
)
from specdecode_worker.engine.target import (
    LaunchedStep,
    QueuedRows,
    StepTimer,
    Synthetic,
    Target,
    commit_chunks,
    gather_output_logprobs,
    gather_prompt_logprobs,
    upload_rows,
)
from specdecode_worker.engine.transfer import Refused
from specdecode_worker.guided.grammars import GrammarCompiler
from specdecode_worker.models.errors import ModelError
from specdecode_worker.sampling.sampler import HostMasks, TokenMasks
from specdecode_worker.sampling.trees import PLAIN, Tree, extended, tree_of
from specdecode_worker.stages import start_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """Components of an engine, built by ``factory.assemble``."""

    scheduler: Scheduler
    target: Target
    drafts: DraftRegistry
    state: DeviceState
    shape_selector: ShapeSelector
    coupled: bool = True
    """The sampler is ``coupled``, else ``mss``."""
    graphs: StepGraphs | None = None
    """Captured CUDA graphs; without them no step is captured."""
    grammars: GrammarCompiler | None = None
    exchange: BlockExchange | None = None
    """Exchange of cache blocks with other workers; None without one."""


class StepLauncher:
    """Launcher of steps: turns the rows of a batch into a queued step. It keeps no state of requests."""

    def __init__(self, parts: EngineParts, phases: PhaseTimer) -> None:
        """Connect the parts of the engine, whose steps are timed by ``phases``."""
        self._target, self._drafts, self._state = parts.target, parts.drafts, parts.state
        self._phases, self._graphs, self._coupled = phases, parts.graphs, parts.coupled
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
        proposals = self._drafts.proposals.propose(rows, step.forest, step.sampler)
        return proposals if step.masks is None else replace(proposals, masks=_verified_masks(step.masks))

    def _masked(self, ready: ReadyStep, rows: tuple[Row, ...]) -> Proposals:
        """Run the graph of the draft passes, if there are any, and compute the masks of rows with a grammar.

        The drafts propose under the masks of the roots alone.
        """
        assert self._graphs is not None, "a planned step has graphs"
        masks = self._step_of(rows).masks
        assert masks is not None, "a row has a grammar"
        self._write_given_tokens(rows)
        proposals = Proposals()
        if ready.drafts is not None:
            proposals = self._graphs.replay_drafts(ready, rows, masks.of_roots())
        return replace(proposals, masks=_verified_masks(masks))

    def _run(
        self, rows: tuple[Row, ...], choice: Choice, depth_limits: tuple[int, ...], *, draft_prefill: bool
    ) -> QueuedRows:
        """Queue rows without a graph, in one pass of the target."""
        phases = self._phases
        emitting = [row for row in rows if row.emits]
        cuts, proposed = depth_limits if self.synthetic.cuts else None, Proposals()
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
        if step is None:
            host_copy = HostCopy.after_queued(self._state.length_S.device)
        return QueuedRows(
            rows=rows,
            outcome_BC=copies[0] if copies else None,
            ranked_BNK=copies[1] if len(copies) > 1 else None,
            host_copy=host_copy,
            output_logprobs=output_logprobs,
            prompt_logprobs=prompt_logprobs,
            own_ranks=proposed.own_ranks,
            draft_seconds=draft_seconds,
        )

    def _step_of(self, rows: Sequence[Row], depth_limits: Sequence[int] | None = None) -> UncapturedStep:
        return UncapturedStep(rows, self._target, self._state, coupled=self._coupled, depth_limits=depth_limits)

    def _write_given_tokens(self, emitting: Sequence[Row]) -> None:
        """Write the tokens of trees that are not drafted behind the roots of their rows."""
        tokens_SP, length_S, device = self._state.tokens_SP, self._state.length_S, self._state.length_S.device
        for row in emitting:
            if tokens := given_tokens(row.request, row.tree):
                slot = row.request.slot
                index_N = length_S[slot] + 1 + torch.arange(len(tokens), device=device)
                tokens_SP[slot, index_N] = to_device(list(tokens), device, dtype=torch.int64)


def _verified_masks(masks: TokenMasks) -> HostMasks:
    """Wait for the drafted tokens of rows with a grammar, and return the masks of all verified nodes."""
    masks.load_tokens()
    return masks.verified()


# Selection of the draft tree of every decoding request from the plan, the guard and exploration.
#
# It reads no clock: its caller passes measured step times to ``ShapeSelector.record_step``.

_PLAIN_SHAPE = TreeShape(())


def planned_shapes(plan: Plan, concurrency: int, context: int) -> set[TreeShape]:
    """Return the shapes that the plan assigns to the tasks of a (concurrency, context) bucket."""
    rows = {row.shape for row in plan.rows if (row.concurrency, row.context) == (concurrency, context)}
    return rows or {plan.initial}


class ShapeSelector:
    """Shape selector of one engine. Without a draft it selects plain decoding for every request."""

    def __init__(self, dispatcher: Dispatcher, drafts: DraftRegistry) -> None:
        """Start with the plan of ``dispatcher``, an empty guard and no exploration under way."""
        self.forced_shape: TreeShape | None = None
        """Shape forced for all requests while step times are calibrated; None follows the plan."""
        self._dispatcher, self._drafts = dispatcher, drafts
        self._guard = Guard()
        self._exploration = Exploration()
        self._explores = True
        self._curve = PlainStepTimes()

    @property
    def plan(self) -> Plan:
        """Plan in force."""
        return self._dispatcher.plan

    @property
    def plan_state(self) -> PlanState:
        """State of the plan for the report."""
        return self._dispatcher.state

    @property
    def draft_prefill(self) -> bool:
        """True if drafts process prompts: a draft is loaded and the plan can lead to drafting."""
        return bool(self._drafts) and (self.plan.max_depth > 0 or self.plan.initial.nodes > 0 or bool(self.plan.rows))

    def guard_cells(self) -> tuple[GuardCell, ...]:
        """Return the guard's state per load for the report."""
        return self._guard.cells()

    def set_plain_step_time(self, sequences: int, seconds: float) -> None:
        """Store the time in seconds of a plain step of ``sequences`` requests, measured before the first request."""
        self._curve.learn(sequences, seconds)
        bucket = bisect_left(self.plan.buckets.concurrency, sequences)
        self._guard.assume(bucket, 0, self._curve.scaled(seconds, sequences, self._edge(bucket)))

    def take_plan(self, plan: Plan) -> None:
        """Apply a plan. The guard drops its evidence on shapes that the plan no longer contains.

        Raises:
            PlanRefused: The plan is for another deployment or older than the current one.
        """
        before = self.plan
        self._dispatcher.set_plan(plan)
        if plan.buckets != before.buckets:
            self._guard = Guard()
        self._exploration.restart(changed_loads(before, plan))
        self._guard.retain_planned(lambda cell, shape: shape in planned_shapes(plan, *cell))

    def set_draft_hash(self, first_hash: str) -> None:
        """Handle a change of drafts: reset the guard and set the hash that the plan's rows are matched against.

        The guard keeps its times of plain steps, which do not depend on the draft.

        Args:
            first_hash: Hash of the first draft. Plan rows apply only if they were planned for it.
        """
        self._dispatcher.draft_hash = first_hash
        self._guard = self._guard.without_shapes()
        self._exploration.restart()

    def set_trial(self, *, active: bool) -> None:
        """Begin or end a draft trial.

        During it the rows of the plan apply to any draft, and nothing is explored: bursts and shadow passes take time,
        and could fall into the blocks of one draft more often than into those of the other.
        """
        self._dispatcher.accepts_any_draft = active
        self._explores = not active

    def select(self, requests: Sequence[Request]) -> Selection:
        """Return the trees of the decoding requests, at least one, and the choice that they follow.

        All requests use the plan rows of the longest context in the batch, because step times are recorded by the
        longest context.
        """
        concurrency = self._dispatcher.load(len(requests))
        context = self._dispatcher.context(max(request.cached_bound for request in requests))
        if not self._drafts or self.forced_shape is not None:
            forced_shape = self.forced_shape if self._drafts and self.forced_shape is not None else _PLAIN_SHAPE
            tree = tree_of(forced_shape, 0)
            trees = [tree if forced_shape.nodes and self._drafts.ready(request) else PLAIN for request in requests]
            return Selection(trees, Choice(len(requests), concurrency, context, forced_shape))
        # Requests of one task share a shape, so the shape is looked up once per task and not once per request.
        tasks = [request.submit.task for request in requests]
        planned = {task: self._dispatcher.shape(Load(concurrency, context, task)) for task in set(tasks)}
        allowed = {task: self._allowed(concurrency, context, shape) for task, shape in planned.items()}
        # Draft passes serve all requests of a step. A shape that does not pay alone costs little beside another.
        shapes = planned if any(shape.nodes for shape in allowed.values()) else allowed
        first, max_depth = tasks[0], self.plan.max_depth if self._explores else 0
        burst = self._exploration.burst_for(concurrency, shapes[first], planned[first], max_depth, self.plan.explore)
        counted = True
        if burst is not None and max_depth:
            burst.done += 1
            counted = burst.done > DROPPED_STEPS
            shapes = dict.fromkeys(shapes, burst.shape)
        shadow = self._shadow_depth() if burst is None and self._explores else 0
        tree_by_task = {task: tree_of(shape, shadow) for task, shape in shapes.items()}
        ready = [self._drafts.ready(request) for request in requests]
        trees = [tree_by_task[task] if can else PLAIN for task, can in zip(tasks, ready, strict=True)]
        if self._drafts.tasks.merges and not shadow:
            trees = [self._extended(tree, request) for tree, request in zip(trees, requests, strict=True)]
        different = {id(tree): tree for tree in trees}.values()
        passes = max(tree.drafted_depth for tree in different) - max(tree.depth for tree in different)
        # The time of a step in which some requests had no draft ready is no evidence about the intended shape.
        shape = shapes[first]
        same_shape = len(set(shapes.values())) == 1 and (all(ready) or not shape.nodes)
        explores = burst is not None or self._probes(concurrency, context, shapes.values())
        common_shape = shape if same_shape else None
        choice = Choice(len(requests), concurrency, context, common_shape, explores, counted, passes)
        return Selection(trees, choice)

    def record_step(self, choice: Choice, seconds: float, tokens: float, shadow_seconds: float) -> None:
        """Pass a measured step without prefill to the guard and to exploration.

        Steps with a forced shape (``forced_shape``) are ignored.

        Args:
            choice: Choice that the step ran with.
            seconds: Duration of the step.
            tokens: Emitted tokens per sequence.
            shadow_seconds: Part of ``seconds`` spent on shadow passes.
        """
        if self.forced_shape is not None:
            return
        edge = self._edge(choice.concurrency)
        full, shadow = (self._curve.scaled(part, choice.sequences, edge) for part in (seconds, shadow_seconds))
        if self._explores:  # else the share of a whole trial would be explored at once after it
            self._exploration.passed(
                choice.concurrency, full, tokens, explores=choice.explores, shape=choice.shape, shadow_seconds=shadow
            )
        if choice.shape is not None and choice.counted:
            self._guard.record_step(choice.concurrency, choice.context, choice.shape, full - shadow, tokens)

    def _extended(self, tree: Tree, request: Request) -> Tree:
        """Return the tree of a request, deeper if drafts without passes extend it. Plain decoding stays plain."""
        depth = self._drafts.proposals.extension(request) if tree.drafted_depth else 0
        return extended(tree, depth) if depth else tree

    def _edge(self, bucket: int) -> int:
        """Return the number of sequences that step times of a bucket are scaled to: its upper edge.

        The bucket beyond the last edge has no upper edge and uses the last one.
        """
        edges = self.plan.buckets.concurrency
        return edges[min(bucket, len(edges) - 1)] if edges else 1

    def _allowed(self, concurrency: int, context: int, shape: TreeShape) -> TreeShape:
        """Return the planned ``shape`` of a load, or plain decoding if the guard stopped that shape."""
        stopped = self.plan.guard and not self._guard.allows(concurrency, context, shape)
        return _PLAIN_SHAPE if stopped else shape

    def _probes(self, concurrency: int, context: int, shapes: Iterable[TreeShape]) -> bool:
        """Return whether the guard is probing one of the shapes at this load."""
        return self.plan.guard and any(self._guard.is_probe(concurrency, context, shape) for shape in shapes)

    def _shadow_depth(self) -> int:
        """Return the depth to draft for scoring only, 0 if exploration affords no shadow passes now."""
        return self.plan.max_depth if self._exploration.shadows(self.plan.explore) else 0


# Engine: arrivals, steps in flight, and requests that end.

WAIT_SECONDS = 0.002
"""Longest wait for a compilation or for blocks while no request runs, so that the engine still reads its messages."""


class Engine:
    """Inference engine of one worker: owns the requests and the loop of steps; its parts own the device memory."""

    def __init__(
        self,
        parts: EngineParts,
        identity: WorkerIdentity,
        *,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        pipelined: bool,
        load_draft: LoadDraft | None = None,
    ) -> None:
        """Connect the parts.

        Args:
            parts: Components of the engine.
            identity: Constant fields of the worker's reports.
            max_model_len: Most tokens of a prompt and its answer together.
            eos_token_ids: Token ids that end an answer, from the model's configuration; all are in its vocabulary.
            pipelined: Launch a step before the previous one is collected.
            load_draft: Loader of another draft while the engine runs; without it no draft can be swapped in.
        """
        self.load_draft = load_draft
        self.on_launch: Callable[[int, int], None] | None = None
        """Called with the numbers of rows and prefill tokens of each step, before it is queued on the device."""
        self.identity = identity
        # A request longer than the whole cache could never be admitted and would block the queue behind it.
        self.max_model_len = min(max_model_len, parts.scheduler.kv_tokens_total)
        self.vocab_size = parts.target.vocab_size
        self.eos_token_ids = eos_token_ids
        self._scheduler, self._target, self._drafts = parts.scheduler, parts.target, parts.drafts
        self._state, self._shape_selector = parts.state, parts.shape_selector
        self._phases, self._step_timer = PhaseTimer(), StepTimer()
        self._graphs = parts.graphs
        self._launcher = StepLauncher(parts, self._phases)
        self._recorder = StepRecorder(Statistics())
        self._requests: dict[str, Request] = {}
        self._deadlines = Deadlines()
        self._grammars = GrammarQueue(parts.grammars, self.eos_token_ids)
        self._exchange = parts.exchange
        self._launched: deque[LaunchedStep] = deque()
        self._ahead = 1 if pipelined else 0
        if self._scheduler.reuse.enabled:
            self._state.allocate_block_states(self._scheduler.blocks)

    @property
    def idle(self) -> bool:
        """True if the engine has no request and no step in flight, and no other worker waits for blocks."""
        return not self._requests and not self._launched and not (self._exchange is not None and self._exchange.busy)

    @property
    def draft(self) -> DraftState:
        """State of the first draft; its ``problem`` gives the reason if that draft could not be loaded."""
        return self._drafts.state()

    @property
    def target_form(self) -> str:
        """Format of the target's matrices; empty for that of activations."""
        return self._target.form

    def add(self, submit: Submit) -> None:
        """Queue a request.

        Raises:
            ValueError: The request can never run: no prompt token, no new token, more than ``max_model_len`` tokens,
                token ids outside of the vocabulary, or a complete answer to continue; or it has a grammar and this
                engine no tokenizer. The server checks the same before it submits a request.
        """
        prompt, new = len(submit.prompt), submit.sampling.max_tokens
        if prompt < 1 or new < 1 or prompt + new > self.max_model_len:
            raise ValueError(
                f"{prompt} prompt tokens and {new} new ones do not fit: there must be one of each, and at most "
                f"{self.max_model_len} together; shorten the prompt or lower max_tokens"
            )
        # A lookup beyond the embedding would end the engine process, on a GPU in a later step.
        known = (*submit.prompt, *(submit.emitted or ()))
        if not 0 <= min(known) <= max(known) < self.vocab_size:
            raise ValueError(f"the prompt has token ids outside of 0 to {self.vocab_size - 1}, which are the model's")
        request = Request.of(submit, self.eos_token_ids, arrived_seconds=submit.arrival_seconds or time.monotonic())
        check_tokens(request.sampling_params, self.vocab_size)
        if submit.sampling.grammar:
            self._grammars.add(request)
        self._drafts.assign_draft(request)
        self._add_request_seconds(time.monotonic())
        self._requests[request.id] = request
        self._deadlines.add(submit, self._requests)
        if not submit.sampling.grammar:
            self._queue(request)
        self._recorder.record_arrival(request)

    def open_exchange(self, address: tuple[str, int] | None, wake: Callable[[], None]) -> int:
        """Begin to exchange cache blocks with other workers; nothing happens without an exchange.

        Args:
            address: Host and port to listen on; None not to listen.
            wake: Function that ends the engine's sleep. Threads call it.

        Returns:
            Port that is listened on, 0 if none is.

        Raises:
            OSError: The address cannot be listened on.
        """
        if self._exchange is None:
            return 0
        self._exchange.open(address, self.max_model_len, wake)
        return 0 if self._exchange.server is None else self._exchange.server.port

    def abort(self, request_id: str, *, stopped: bool = False) -> None:
        """End a request and drop its results of steps in flight. Unknown ids are ignored.

        Args:
            request_id: Id of the request.
            stopped: Its text is complete, because of a stop string: it counts as finished.
        """
        request = self._requests.get(request_id)
        if request is not None:
            request.finish = "stop" if stopped else "abort"
            self._end(request, time.monotonic())

    @torch.inference_mode()
    def set_plan(self, plan: Plan) -> None:
        """Apply a plan from the next step on.

        The first plan that arrives while the engine is idle and has no CUDA graphs also starts their capture.

        Raises:
            PlanRefused: The plan is for another deployment or older than the current one, which stays in force. A
                ValueError.
        """
        self._shape_selector.take_plan(plan)
        self._drafts.set_tasks(plan.tasks)
        if self._exchange is not None:
            self._exchange.set_peers(plan.prefill)
        if self._graphs is not None:
            self._graphs.count_anew()
            if self.idle and not len(self._graphs):
                self._graphs.prepare(self._planned_shapes())

    def _planned_shapes(self) -> set[TreeShape]:
        """Return the shapes that steps may have by the plan."""
        plan = self._shape_selector.plan
        return {plan.initial, *(row.shape for row in plan.rows), *self.calibration_shapes()}

    @torch.inference_mode()
    def set_draft(self, name: str, loaded: LoadedDraft) -> list[Tokens]:
        """Replace the draft called ``name`` between two steps and return the tokens of the steps in flight.

        Steps in flight are collected first. Running requests continue with the new draft, once the graphs are captured
        that it needs.

        Raises:
            ModelError: The draft cannot be used; nothing has changed.
        """
        before, reads = self._drafts.state(name).hash, self._drafts.reads
        try:
            states = self._drafts.new_states(name, loaded)
        except Exception as error:
            raise ModelError(describe_failure(error, loaded.state.uri)) from None
        collected = [tokens for _ in range(len(self._launched)) for tokens in self.collect(self._launched.popleft())]
        self._drafts.replace(name, loaded, self._requests.values(), states)
        if self._graphs is not None:
            self._graphs.swap_draft(name, self._planned_shapes(), states_changed=states is not None)
        self._scheduler.reuse.forget(before, states=self._drafts.reads != reads)
        self._shape_selector.set_draft_hash(self._drafts.state().hash)
        return collected

    def loaded_draft(self) -> LoadedDraft | None:
        """Return the first draft, or None if it is not loaded."""
        return self._drafts.loaded()

    def set_block(self, block: BlockCosts | None) -> None:
        """Begin a block of a draft trial, which counts the requests admitted from now on. None ends the trial."""
        self._recorder.block = block
        self._shape_selector.set_trial(active=block is not None)

    def calibration_loads(self) -> tuple[int, ...]:
        """Return the batch sizes at which step times are calibrated, ascending.

        These are the edges of the plan's concurrency buckets, capped at ``max_num_seqs``, and ``max_num_seqs`` itself.
        Empty without a draft.
        """
        if not self._drafts:
            return ()
        most = self.identity.max_num_seqs
        return tuple(sorted({most, *(min(edge, most) for edge in self._shape_selector.plan.buckets.concurrency)}))

    def calibration_shapes(self) -> tuple[TreeShape, ...]:
        """Return the shapes for which step times are calibrated, deepest first; empty if the plan allows no trials."""
        return self._shape_selector.plan.timed_shapes

    def force_shape(self, shape: TreeShape | None) -> None:
        """Force one shape in all steps, for calibration. None returns to the plan."""
        self._shape_selector.forced_shape = shape

    def set_plain_step_time(self, sequences: int, seconds: float) -> None:
        """Store the calibrated time of a plain step of ``sequences`` requests, in seconds."""
        self._shape_selector.set_plain_step_time(sequences, seconds)

    def reset_step_costs(self) -> None:
        """Reset the measured step costs."""
        self._recorder.statistics.costs = StepCosts()

    def reset_traffic(self) -> None:
        """Reset the statistics of requests and keep the measured step costs. The engine must be idle."""
        assert self.idle, "requests are under way"
        self._recorder = StepRecorder(Statistics(costs=self._recorder.statistics.costs))
        self._scheduler.counters = Counters()

    def close(self) -> None:
        """End the other processes of a replica on several devices: the ranks above 0.

        They end after the steps in flight, whose collectives would never return here without them. The graphs go
        before: NCCL leaves no group whose collectives a graph still holds (`commDestroySync` of its src/init.cc).
        """
        try:
            while self._launched:
                self._launched.popleft().read()
        finally:
            if self._graphs is not None:
                self._graphs.release()
            self._grammars.close()
            if self._exchange is not None:
                self._exchange.close()
            self._target.close()

    def set_synthetic(self, knobs: SyntheticKnobs | None) -> None:
        """Set or clear (None) the synthetic knobs, which shorten accepted paths and pad steps in tests."""
        self._launcher.synthetic = Synthetic(knobs)

    @torch.inference_mode()
    def step(self) -> list[Tokens]:
        """Launch the next step, collect the oldest step if it is due, and return its tokens.

        Requests whose deadline has passed are cancelled first, so that they take no part in the step.
        """
        expired = self._cancel_expired(time.monotonic())
        if self._grammars:
            expired += self._admit_compiled()
        if self._exchange:
            self._exchange_blocks(self._exchange)
        launched = self.launch()
        if launched is not None:
            self._launched.append(launched)
        if self._launched and (launched is None or len(self._launched) > self._ahead):
            return expired + self.collect(self._launched.popleft())
        return expired

    def launch(self) -> LaunchedStep | None:
        """Queue the next step on the device without waiting for it. Return None if no request can run."""
        began = time.monotonic()
        self._phases.start()
        self._add_request_seconds(began)
        draft_prefill = self._draft_prefill
        self._scheduler.reuse.draft_prefill = draft_prefill
        for identity in self._drafts.take_restarted(self._requests.values()):
            self._scheduler.reuse.forget(identity, states=False)
        batch, choice = self._scheduler.next_batch(self._select_trees)
        if not batch:
            return None
        rows = tuple(batch)
        chunks = rows[decoding_rows(rows) :]
        if self.on_launch is not None:
            self.on_launch(len(rows), sum(row.count for row in chunks))
        for row in chunks:
            if row.is_first_chunk:
                self._recorder.record_admission(row.request, began)
                if self._drafts.tasks.name(row.request.submit.task) == DEFAULT_DRAFT:
                    self._recorder.admit_to_block(row.request)
        launched = self._launcher.launch(rows, choice, began_seconds=began, draft_prefill=draft_prefill)
        for row in rows:
            request = row.request
            request.record_launch(row.max_committed, drafts_follow=row.is_chunk and draft_prefill)
        for row in chunks:
            self._scheduler.reuse.publish(row.request, row.start + row.count)
        return launched

    def collect(self, step: LaunchedStep) -> list[Tokens]:
        """Wait for a step and return its tokens, cut at the end of each request."""
        self._phases.start()
        reads: list[RowResult | None] = list(step.read())
        reads += [None] * (len(step.rows) - len(reads))
        prompts = step.read_prompts()
        self._phases.lap("verify")
        seconds, now = self._step_timer.finish(step, self._launcher.synthetic)
        self._phases.start()
        emissions = []
        emitted, self._recorder.context = 0, step.choice.context
        for index, (row, epoch, read) in enumerate(zip(step.rows, step.epochs, reads, strict=True)):
            request = row.request
            if request.finish is not None or request.epoch != epoch:
                continue  # The request ended, or was preempted and will emit these tokens again.
            request.advance(row.count if row.is_chunk or read is None else len(read.tokens))
            if index in prompts:
                request.prompt_logprobs += prompts[index]
            if read is not None:
                emitted += len(read.tokens)
                emissions.append(self._emit(row, read, now))
        self._measure(step, seconds, emitted)
        self._phases.lap("bookkeeping")
        return emissions

    @property
    def draft_names(self) -> tuple[str, ...]:
        """Names of the drafts, loaded or not; empty for the default draft."""
        return self._drafts.names

    def report(self, swaps: Mapping[str, SwapStatus] = NO_SWAPS, trial: TrialState | None = None) -> Report:
        """Build the report of this worker for the operator, with the swaps of drafts by name and the draft trial."""
        now = time.monotonic()
        self._add_request_seconds(now)
        state = Report(
            **asdict(self.identity),
            clock_seconds=now,
            start=start_seconds(),
            draft=self._drafts.reported(DEFAULT_DRAFT, swaps),
            named_drafts=self._drafts.named(swaps),
            trial=trial,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            kv_tokens_total=self._scheduler.kv_tokens_total,
            kv_tokens_used=self._scheduler.kv_tokens_used,
            kv_tokens_cached=self._scheduler.kv_tokens_cached,
            **asdict(self._scheduler.counters),
            plan=self._shape_selector.plan_state,
            synthetic=self._launcher.synthetic.knobs,
            phases=self._phases.seconds,
            guard=self._shape_selector.guard_cells(),
        )
        return build_report(state, self._recorder.statistics)

    def _emit(self, row: Row, read: RowResult, now: float) -> Tokens:
        """Append the tokens of one row to its request, end the request if it is complete, and return the message."""
        request = row.request
        if row.tree.verified > 1 and not row.tree.given:
            request.drafts += 1
            request.draft_tokens += row.tree.verified - 1
            request.accepted += len(read.tokens) - 1
        taken = request.append_output(read.tokens)
        self._scheduler.reuse.publish(request, min(request.cached, len(request.tokens)))
        self._recorder.record_row(row, read, taken, now)
        if read.credits:
            self._drafts.proposals.record_credit(request, read.credits)
        if request.finish is not None:
            self._end(request, now)
        prompt_logprobs: tuple[Logprobs, ...] = ()
        if request.prompt_logprobs:
            prompt_logprobs = tuple(request.prompt_logprobs)
            request.prompt_logprobs.clear()
        return Tokens(
            request_id=request.id,
            tokens=tuple(taken),
            finish=request.finish,
            cached_tokens=request.cached_tokens,
            drafts=request.drafts,
            draft_tokens=request.draft_tokens,
            accepted=request.accepted,
            logprobs=read.logprobs[: len(taken)],
            prompt_logprobs=prompt_logprobs,
            error=request.guide.error if request.guide is not None else "",
        )

    def _select_trees(self, requests: Sequence[Request]) -> Selection:
        """Return the trees of decoding requests: those of the plan, or chains of tokens that a grammar forces."""
        selection = self._shape_selector.select(requests)
        if self._shape_selector.forced_shape is not None or not any(request.guide for request in requests):
            return selection
        return with_forced_tokens(selection, requests)

    def _admit_compiled(self) -> list[Tokens]:
        """Queue the requests whose grammars are compiled, and return the last messages of those that are refused."""
        refused = []
        for request, problem in self._grammars.take_ready(0.0 if self._has_work else WAIT_SECONDS):
            if problem:
                request.finish = "error"
                self._requests.pop(request.id)
                refused.append(Tokens(request_id=request.id, tokens=(), finish="error", error=problem))
            else:
                self._queue(request)
        return refused

    def _queue(self, request: Request) -> None:
        """Queue a request for the next steps, or let it wait for blocks of another worker."""
        if self._exchange is None or not self._exchange.park(request, time.monotonic(), draft=self._draft_prefill):
            self._scheduler.add(request)

    @property
    def _has_work(self) -> bool:
        return bool(self._launched) or not self._scheduler.idle

    @property
    def _draft_prefill(self) -> bool:
        """True if drafts process prompts. Those of a prefill worker do so for the plans of others."""
        computes = self._exchange is not None and self._exchange.computes
        return self._shape_selector.draft_prefill or (computes and bool(self._drafts))

    def _exchange_blocks(self, exchange: BlockExchange) -> None:
        """Store blocks that have arrived, queue the requests that waited for them, and send blocks to others."""
        if not self._has_work:
            exchange.wait(WAIT_SECONDS)
        for request in exchange.take_ready(time.monotonic()):
            self._scheduler.add(request)
        for submit, outgoing in exchange.take_wants():
            try:
                if outgoing.want.compute:
                    self.add(submit)
                    request = self._requests[submit.request_id]
                else:
                    request = Request.of(submit, self.eos_token_ids, arrived_seconds=submit.arrival_seconds)
                    self._drafts.assign_draft(request)
                problem = exchange.export(request, outgoing)
            except ValueError as error:
                problem = str(error)
            if problem:
                self.abort(submit.request_id)
                outgoing.finish(Refused(problem))
        for request_id in exchange.advance_exports(self._requests.__contains__):
            self.abort(request_id)

    def _cancel_expired(self, now: float) -> list[Tokens]:
        """Cancel the requests whose deadline has passed and return their last messages.

        The longest time in the queue concerns only requests that were never admitted.
        """
        cancelled = []
        for request_id, reason in self._deadlines.pop_expired(now):
            request = self._requests.get(request_id)
            if request is None or (reason == "queue_timeout" and (request.slot >= 0 or request.epoch)):
                continue
            request.finish = reason
            self._end(request, now)
            cancelled.append(Tokens(request_id=request_id, tokens=(), finish=reason))
        return cancelled

    def _end(self, request: Request, now: float) -> None:
        """Remove a finished or cancelled request and free its slot and blocks."""
        self._add_request_seconds(now)
        del self._requests[request.id]
        if request in self._grammars:
            self._grammars.discard(request)
        elif self._exchange is not None and request in self._exchange:
            self._exchange.discard(request)
        else:
            self._scheduler.release(request)
        self._recorder.record_end(request, now)
        self._drafts.record_end(request)

    def _measure(self, step: LaunchedStep, seconds: float, emitted: int) -> None:
        """Record the step time; steps that only decode also inform the guard and exploration."""
        self._scheduler.prefill_limit.record_step(step.size.prefill_tokens, seconds)
        self._recorder.record_block_step(step.choice.concurrency, step.choice.context, seconds)
        if step.choice.counted or step.size.prefill_tokens:
            self._recorder.statistics.costs.add(step.choice.context, step.size, emitted, seconds)
        # A step without a token tells no time per token: all of its requests ended after its launch.
        if step.size.prefill_tokens == 0 and emitted:
            self._shape_selector.record_step(step.choice, seconds, emitted / step.size.sequences, step.shadow_seconds)

    def _add_request_seconds(self, now: float) -> None:
        """Add the request-seconds since the last call to the statistics."""
        self._step_timer.account(self._recorder.statistics, self._scheduler, now)
