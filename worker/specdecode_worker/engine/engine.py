"""The engine: requests in, tokens out, one step at a time. Knows nothing of text, sockets or processes.

`launch` queues a step and waits for nothing; `collect` reads a step back. On an accelerator launch(n + 1) precedes
collect(n); on a CPU, where nothing is asynchronous, collect(n) comes first and spares the wasted step.
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
    """What an engine is made of; see factory.py."""

    scheduler: Scheduler
    target: Target
    drafts: Roster
    state: DeviceState
    pilot: Pilot
    sampler: SamplerOf = Coupling
    graphs: Graphs | None = None


class Engine:
    """Owns the requests; the parts own the device."""

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
        """``load_draft`` loads another draft while this engine runs; without it none can be swapped in."""
        self.load_draft = load_draft
        self.identity = identity
        # A request that the whole cache cannot hold would wait for ever, and everyone behind it.
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
        return not self._requests and not self._launched

    @property
    def draft(self) -> DraftState:
        """The first draft, or why there is none."""
        return self._drafts.state()

    @property
    def preemptions(self) -> int:
        return self._scheduler.counters.preemptions

    def add(self, submit: Submit) -> None:
        """Queues a request. Raises ValueError for one that can never run; the server has checked before."""
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
        """Forgets a request; what a step in flight says of it is dropped. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            request.finish = "abort"
            self._end(request, time.monotonic())

    @torch.inference_mode()
    def set_plan(self, plan: Plan) -> None:
        """Runs from the next step on. Raises PlanRefused (a ValueError), and keeps the old one. At the
        start, graphs are captured for it."""
        self._pilot.take_plan(plan)
        self._drafts.set_tasks(plan.tasks)
        if self._graphs is not None and self.idle and not len(self._graphs):
            self._graphs.prepare({plan.initial, *(row.shape for row in plan.rows), *self.calibration_shapes()})

    @torch.inference_mode()
    def set_draft(self, name: str, loaded: LoadedDraft) -> list[Tokens]:
        """Lets a draft that was loaded beside the others take over between two steps; what was in flight comes out
        first. Running requests go on with it."""
        found = [tokens for _ in range(len(self._launched)) for tokens in self.collect(self._launched.popleft())]
        before, reads = self._drafts.state(name).hash, self._drafts.reads
        self._drafts.replace(name, loaded, self._requests.values())
        if self._graphs is not None:
            self._graphs.forget()
        self._scheduler.forget_draft(before, states=self._drafts.reads != reads)
        self._pilot.draft_changed(self._drafts.state().hash)
        return found

    def calibration_loads(self) -> tuple[int, ...]:
        """Edges of the plan's concurrency buckets that this engine can reach, and a full batch; none where nothing is
        ever drafted."""
        if not self._drafts:
            return ()
        most = self.identity.max_num_seqs
        return tuple(sorted({most, *(min(edge, most) for edge in self._pilot.plan.buckets.concurrency)}))

    def calibration_shapes(self) -> tuple[TreeShape, ...]:
        """The deepest and the shallowest chain, where the plan lets shapes be tried: what lies between follows."""
        plan = self._pilot.plan
        depths = {plan.max_depth, 1} if plan.max_depth and plan.explore else set()
        return tuple(TreeShape.chain(depth) for depth in sorted(depths, reverse=True))

    def run_only(self, shape: TreeShape | None) -> None:
        """This shape in all steps, whatever the plan says; None follows the plan again."""
        self._pilot.only = shape

    def assume_plain(self, sequences: int, seconds: float) -> None:
        self._pilot.assume_plain(sequences, seconds)

    def forget_costs(self) -> None:
        """Counts what steps cost from here on."""
        self._recorder.statistics.costs = StepCosts()

    def forget_traffic(self) -> None:
        """Counts requests from here on. What steps cost stays known."""
        assert self.idle, "requests are under way"
        self._recorder = Recorder(Statistics(costs=self._recorder.statistics.costs))
        self._scheduler.forget_traffic()

    def close(self) -> None:
        """Ends what runs beside this process: the other ranks of a replica on several devices."""
        self._target.close()

    def set_synthetic(self, knobs: SyntheticKnobs | None) -> None:
        self._launcher.synthetic = Synthetic(knobs)

    @torch.inference_mode()
    def step(self) -> list[Tokens]:
        """One turn of the loop: launches what can run, collects what is due."""
        launched = self.launch()
        if launched is not None:
            self._launched.append(launched)
        if self._launched and (launched is None or len(self._launched) > self._ahead):
            return self.collect(self._launched.popleft())
        return []

    def launch(self) -> Launched | None:
        """Queues the next step on the device, if anybody can run; waits for nothing."""
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
        """Reads a step back: what it emitted, up to each request's end."""
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
                continue  # over, or preempted: its tokens will come out again
            row.request.advance(row.most_tokens, row.count if row.is_chunk or read is None else len(read.tokens))
            row.request.prompt_logprobs += prompts.get(index, ())
            if read is not None:
                emitted += len(read.tokens)
                found.append(self._emit(row, read, now))
        self._measure(step, seconds, emitted)
        self._phases.lap("bookkeeping")
        return found

    def report(self) -> Report:
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
        """The books of slots and blocks balance; cheap enough to run whenever idle."""
        self._scheduler.check()

    def _emit(self, row: Row, read: Read, now: float) -> Tokens:
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
        self._account(now)
        del self._requests[request.id]
        self._scheduler.release(request)
        self._recorder.ended(request, now)

    def _measure(self, step: Launched, seconds: float, emitted: int) -> None:
        if step.choice.counted or step.size.prefill_tokens:
            self._recorder.step(step.choice.context, step.size, emitted, seconds)
        if step.size.prefill_tokens == 0 and step.size.sequences:
            self._pilot.measured(step.choice, seconds, emitted / step.size.sequences, step.shadow_seconds)

    def _account(self, now: float) -> None:
        self._meter.account(self._recorder.statistics, self._scheduler, now)
