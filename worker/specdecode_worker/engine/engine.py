"""Engine that turns requests into tokens, one batched step at a time.

The engine works on token ids only; text, sockets and processes are handled by its callers.

``launch`` queues a step on the device without waiting; ``collect`` reads its results. On an accelerator step n + 1 is
launched before step n is collected, so the device never waits for the host. On a CPU, which runs synchronously, step n
is collected first: a request that ended in step n then takes no part in step n + 1.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

from specdecode_worker.contract import DraftState, Plan, Report, SyntheticKnobs, TreeShape
from specdecode_worker.engine.drafts.draft_registry import LoadDraft, LoadedDraft, Roster
from specdecode_worker.engine.graphs.step_graphs import Graphs
from specdecode_worker.engine.ipc.messages import Submit, Tokens
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.sampling_params import check_tokens
from specdecode_worker.engine.scheduler import Row, Scheduler
from specdecode_worker.engine.shape_selector import Pilot
from specdecode_worker.engine.stats.report_builder import Identity, Moment, build_report
from specdecode_worker.engine.stats.statistics import Statistics
from specdecode_worker.engine.stats.step_costs import StepCosts
from specdecode_worker.engine.stats.step_phases import Phases
from specdecode_worker.engine.stats.step_recorder import Read, Recorder
from specdecode_worker.engine.stats.step_timer import Meter
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.engine.step.launched_step import Launched
from specdecode_worker.engine.step.step_launcher import Launcher
from specdecode_worker.engine.step.target_pass import Target
from specdecode_worker.speculation.sampling.coupling import Coupling
from specdecode_worker.speculation.sampling.sampler import SamplerOf
from specdecode_worker.speculation.synthetic import Synthetic


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Components of an engine, built by ``factory.assemble``."""

    scheduler: Scheduler
    target: Target
    drafts: Roster
    state: DeviceState
    pilot: Pilot
    sampler: SamplerOf = Coupling
    graphs: Graphs | None = None


class Engine:
    """Inference engine of one worker: owns the requests and the loop of steps; its parts own the device memory."""

    def __init__(
        self,
        parts: Parts,
        identity: Identity,
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
            eos_token_ids: Token ids that end an answer, from the model's configuration.
            pipelined: Launch a step before the previous one is collected.
            load_draft: Loader of another draft while the engine runs; without it no draft can be swapped in.
        """
        self.load_draft = load_draft
        self.identity = identity
        # A request longer than the whole cache could never be admitted and would block the queue behind it.
        self.max_model_len = min(max_model_len, parts.scheduler.kv_tokens_total)
        self.eos_token_ids = eos_token_ids
        self._scheduler, self._target, self._drafts = parts.scheduler, parts.target, parts.drafts
        self._state, self._pilot = parts.state, parts.pilot
        self._phases, self._meter = Phases(), Meter()
        self._graphs = parts.graphs
        self._launcher = Launcher(parts.target, parts.drafts, parts.state, parts.sampler, self._phases, parts.graphs)
        self._recorder = Recorder(Statistics())
        self._requests: dict[str, Request] = {}
        self._launched: deque[Launched] = deque()
        self._ahead = 1 if pipelined else 0
        if self._scheduler.prefix_caching:
            self._state.keep_block_states(self._scheduler.blocks)

    @property
    def idle(self) -> bool:
        """True if the engine has no request and no step in flight."""
        return not self._requests and not self._launched

    @property
    def draft(self) -> DraftState:
        """State of the first draft; its ``problem`` gives the reason if that draft could not be loaded."""
        return self._drafts.state()

    @property
    def preemptions(self) -> int:
        """Number of preemptions since the last reset of the traffic counters."""
        return self._scheduler.counters.preemptions

    def add(self, submit: Submit) -> None:
        """Queue a request.

        Raises:
            ValueError: The request can never run: no prompt token, no new token, more than ``max_model_len`` tokens,
                or token ids outside of the vocabulary. The server checks the same before it submits a request.
        """
        prompt, new = len(submit.prompt), submit.sampling.max_tokens
        if prompt < 1 or new < 1 or prompt + new > self.max_model_len:
            raise ValueError(
                f"{prompt} prompt tokens and {new} new ones do not fit: there must be one of each, and at most "
                f"{self.max_model_len} together; shorten the prompt or lower max_tokens"
            )
        request = Request.of(submit, self.eos_token_ids, arrived_seconds=submit.arrival_seconds or time.monotonic())
        check_tokens(request.law, self._target.vocab_size)
        self._drafts.follow(request)
        self._account(time.monotonic())
        self._requests[request.id] = request
        self._scheduler.add(request)
        self._recorder.arrived(request)

    def abort(self, request_id: str) -> None:
        """Cancel a request and drop its results of steps in flight. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            request.finish = "abort"
            self._end(request, time.monotonic())

    @torch.inference_mode()
    def set_plan(self, plan: Plan) -> None:
        """Apply a plan from the next step on.

        The first plan that arrives while the engine is idle and has no CUDA graphs also starts their capture.

        Raises:
            PlanRefused: The plan is for another deployment or older than the current one, which stays in force. A
                ValueError.
        """
        self._pilot.take_plan(plan)
        self._drafts.set_tasks(plan.tasks)
        if self._graphs is not None and self.idle and not len(self._graphs):
            self._graphs.prepare({plan.initial, *(row.shape for row in plan.rows), *self.calibration_shapes()})

    @torch.inference_mode()
    def set_draft(self, name: str, loaded: LoadedDraft) -> list[Tokens]:
        """Replace the draft called ``name`` between two steps and return the tokens of the steps in flight.

        Steps in flight are collected first. Running requests continue with the new draft.
        """
        found = [tokens for _ in range(len(self._launched)) for tokens in self.collect(self._launched.popleft())]
        before, reads = self._drafts.state(name).hash, self._drafts.reads
        self._drafts.replace(name, loaded, self._requests.values())
        if self._graphs is not None:
            self._graphs.forget()
        self._scheduler.forget_draft(before, states=self._drafts.reads != reads)
        self._pilot.draft_changed(self._drafts.state().hash)
        return found

    def calibration_loads(self) -> tuple[int, ...]:
        """Return the batch sizes at which step times are calibrated, ascending.

        These are the edges of the plan's concurrency buckets, capped at ``max_num_seqs``, and ``max_num_seqs`` itself.
        Empty without a draft.
        """
        if not self._drafts:
            return ()
        most = self.identity.max_num_seqs
        return tuple(sorted({most, *(min(edge, most) for edge in self._pilot.plan.buckets.concurrency)}))

    def calibration_shapes(self) -> tuple[TreeShape, ...]:
        """Return the chains for which step times are calibrated, deepest first; empty if the plan allows no trials.

        Only the deepest chain and the chain of depth 1 are timed; the step times of the depths between follow from
        these two.
        """
        plan = self._pilot.plan
        depths = {plan.max_depth, 1} if plan.max_depth and plan.explore else set()
        return tuple(TreeShape.chain(depth) for depth in sorted(depths, reverse=True))

    def run_only(self, shape: TreeShape | None) -> None:
        """Force one shape in all steps, for calibration. None returns to the plan."""
        self._pilot.only = shape

    def assume_plain(self, sequences: int, seconds: float) -> None:
        """Store the calibrated time of a plain step of ``sequences`` requests, in seconds."""
        self._pilot.assume_plain(sequences, seconds)

    def forget_costs(self) -> None:
        """Reset the measured step costs."""
        self._recorder.statistics.costs = StepCosts()

    def forget_traffic(self) -> None:
        """Reset the statistics of requests and keep the measured step costs. The engine must be idle."""
        assert self.idle, "requests are under way"
        self._recorder = Recorder(Statistics(costs=self._recorder.statistics.costs))
        self._scheduler.forget_traffic()

    def close(self) -> None:
        """End the other processes of a replica on several devices: the ranks above 0."""
        self._target.close()

    def set_synthetic(self, knobs: SyntheticKnobs | None) -> None:
        """Set or clear (None) the synthetic knobs, which shorten accepted paths and pad steps in tests."""
        self._launcher.synthetic = Synthetic(knobs)

    @torch.inference_mode()
    def step(self) -> list[Tokens]:
        """Launch the next step, collect the oldest step if it is due, and return its tokens."""
        launched = self.launch()
        if launched is not None:
            self._launched.append(launched)
        if self._launched and (launched is None or len(self._launched) > self._ahead):
            return self.collect(self._launched.popleft())
        return []

    def launch(self) -> Launched | None:
        """Queue the next step on the device without waiting for it. Return None if no request can run."""
        began = time.monotonic()
        self._phases.start()
        self._account(began)
        follows = self._pilot.drafts_prompts
        self._scheduler.drafts_follow(follows)
        rows = tuple(self._scheduler.next_batch(self._pilot.trees))
        if not rows:
            return None
        for row in rows:
            if row.begins:
                self._recorder.admitted(row.request, began)
        launched = self._launcher.launch(rows, self._pilot.choice, began_seconds=began, follows=follows)
        for row in rows:
            row.request.in_flight.append(row.most_tokens)
            row.request.draft.launched(0 if row.is_chunk and follows else row.most_tokens)
            if row.is_chunk:
                self._scheduler.publish(row.request, row.start + row.count)
        return launched

    def collect(self, step: Launched) -> list[Tokens]:
        """Wait for a step and return its tokens, cut at the end of each request."""
        self._phases.start()
        reads: list[Read | None] = list(step.read())
        reads += [None] * (len(step.rows) - len(reads))
        prompts = step.read_prompts()
        self._phases.lap("verify")
        seconds, now = self._meter.finish(step, self._launcher.synthetic)
        self._phases.start()
        found = []
        emitted = 0
        for index, (row, epoch, read) in enumerate(zip(step.rows, step.epochs, reads, strict=True)):
            if row.request.finish is not None or row.request.epoch != epoch:
                continue  # The request ended, or was preempted and will emit these tokens again.
            row.request.advance(row.most_tokens, row.count if row.is_chunk or read is None else len(read.tokens))
            row.request.prompt_logprobs += prompts.get(index, ())
            if read is not None:
                emitted += len(read.tokens)
                found.append(self._emit(row, read, now))
        self._measure(step, seconds, emitted)
        self._phases.lap("bookkeeping")
        return found

    def report(self) -> Report:
        """Build the report of this worker for the operator."""
        now = time.monotonic()
        self._account(now)
        moment = Moment(
            clock_seconds=now,
            draft=self._drafts.state(),
            named_drafts=self._drafts.named,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            kv_tokens_total=self._scheduler.kv_tokens_total,
            kv_tokens_used=self._scheduler.kv_tokens_used,
            kv_tokens_cached=self._scheduler.kv_tokens_cached,
            counters=self._scheduler.counters,
            plan=self._pilot.plan_state,
            synthetic=self._launcher.synthetic.knobs,
            phases=self._phases.seconds,
            guard=self._pilot.guard_cells(),
        )
        return build_report(self.identity, moment, self._recorder.statistics)

    def check(self) -> None:
        """Check that slots and blocks are accounted for. Cheap enough to run whenever the engine is idle."""
        self._scheduler.check()

    def _emit(self, row: Row, read: Read, now: float) -> Tokens:
        """Append the tokens of one row to its request, end the request if it is complete, and return the message."""
        request = row.request
        if row.tree.verified > 1:
            request.drafts += 1
            request.draft_tokens += row.tree.verified - 1
            request.accepted += len(read.tokens) - 1
        taken = request.take(read.tokens)
        self._scheduler.publish(request, min(request.cached, len(request.tokens)))
        self._recorder.walked(row, read, taken, now)
        if request.finish is not None:
            self._end(request, now)
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
        )

    def _end(self, request: Request, now: float) -> None:
        """Remove a finished or cancelled request and free its slot and blocks."""
        self._account(now)
        del self._requests[request.id]
        self._scheduler.release(request)
        self._recorder.ended(request, now)

    def _measure(self, step: Launched, seconds: float, emitted: int) -> None:
        """Record the step time; steps without prefill also inform the guard and exploration."""
        if step.choice.counted or step.size.prefill_tokens:
            self._recorder.step(step.choice.context, step.size, emitted, seconds)
        if step.size.prefill_tokens == 0 and step.size.sequences:
            self._pilot.measured(step.choice, seconds, emitted / step.size.sequences, step.shadow_seconds)

    def _account(self, now: float) -> None:
        """Add the request-seconds since the last call to the statistics."""
        self._meter.account(self._recorder.statistics, self._scheduler, now)
