"""The engine: requests in, tokens out, one step at a time. Knows nothing of text, sockets or processes.

`launch` queues a step and waits for nothing; `collect` reads a step back. On an accelerator launch(n + 1) precedes
collect(n); on a CPU, where nothing is asynchronous, collect(n) comes first and spares the wasted step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_worker.contract import DraftState, Plan, Report, SyntheticKnobs
from specdecode_worker.engine.drafts.roster import LoadDraft, LoadedDraft, Roster
from specdecode_worker.engine.keeping import keep_chunks, keep_paths, tell_rows
from specdecode_worker.engine.launched import Launched
from specdecode_worker.engine.laws import check_tokens
from specdecode_worker.engine.messages import Submit, Tokens
from specdecode_worker.engine.pilot import Pilot
from specdecode_worker.engine.recorder import Read, Recorder, size_of
from specdecode_worker.engine.report import Identity, Moment, build_report
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.scheduler import Row, Scheduler
from specdecode_worker.engine.state import DeviceState
from specdecode_worker.engine.statistics import Statistics
from specdecode_worker.engine.target import Pass, Target
from specdecode_worker.engine.told import tell_emitted, tell_prompts
from specdecode_worker.speculation.accept import Outcome
from specdecode_worker.speculation.coupling import Coupling
from specdecode_worker.speculation.history import Texts
from specdecode_worker.speculation.sampler import Sampler, SamplerOf
from specdecode_worker.speculation.synthetic import Synthetic
from specdecode_worker.speculation.trees import PLAIN, Forest, forest_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an engine is made of; see factory.py."""

    scheduler: Scheduler
    target: Target
    drafts: Roster
    state: DeviceState
    pilot: Pilot
    sampler: SamplerOf = Coupling


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
        self._state, self._pilot, self._make_sampler = parts.state, parts.pilot, parts.sampler
        self._recorder = Recorder(Statistics())
        self._synthetic = Synthetic()
        self._requests: dict[str, Request] = {}
        self._launched: deque[Launched] = deque()
        self._ahead = 1 if pipelined else 0
        if self._scheduler.prefix_caching:
            self._state.keep_block_states(self._scheduler.blocks)
        self._pass_seconds = 0.0
        self._collected_seconds = self._accounted_seconds = time.monotonic()

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

    def set_plan(self, plan: Plan) -> None:
        """Runs from the next step on. Raises PlanRefused (a ValueError), and keeps the old one."""
        self._pilot.take_plan(plan)
        self._drafts.set_tasks(plan.tasks)

    @torch.inference_mode()
    def set_draft(self, name: str, loaded: LoadedDraft) -> list[Tokens]:
        """Lets a draft that was loaded beside the others take over between two steps; what was in flight comes out
        first. Running requests go on with it."""
        found = [tokens for _ in range(len(self._launched)) for tokens in self.collect(self._launched.popleft())]
        before, reads = self._drafts.state(name).hash, self._drafts.reads
        self._drafts.replace(name, loaded, self._requests.values())
        self._scheduler.forget_draft(before, states=self._drafts.reads != reads)
        self._pilot.draft_changed(self._drafts.state().hash)
        return found

    def calibration_loads(self) -> tuple[int, ...]:
        """Edges of the plan's concurrency buckets that this engine can reach; none where nothing is ever drafted."""
        if not self._drafts:
            return ()
        most = self.identity.max_num_seqs
        return tuple(sorted({min(edge, most) for edge in self._pilot.plan.buckets.concurrency}))

    def run_plainly(self, plainly: bool) -> None:
        self._pilot.plainly = plainly

    def assume_plain(self, sequences: int, seconds: float) -> None:
        self._pilot.assume_plain(sequences, seconds)

    def forget_traffic(self) -> None:
        """Counts requests from here on. What steps cost stays known."""
        assert self.idle, "requests are under way"
        self._recorder = Recorder(Statistics(costs=self._recorder.statistics.costs))
        self._scheduler.forget_traffic()

    def set_synthetic(self, knobs: SyntheticKnobs | None) -> None:
        self._synthetic = Synthetic(knobs)

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
        """Queue one step on the device: draft, verify in one target pass, accept, keep. Waits for nothing."""
        began = time.monotonic()
        rows = self._next_rows(began)
        if not rows:
            return None
        choosing = [row for row in rows if row.chooses]
        forest = forest_of(tuple(row.tree for row in choosing) or (PLAIN,), self._device)
        roots_C = self._target.roots(choosing)
        sampler = self._sampler_of(choosing, forest, roots_C)
        ranked_BNK = self._drafts.propose(choosing, forest, sampler) if choosing else None
        drafted = time.monotonic()
        step = self._target.pack(rows)
        logits_RV, aux_TA, hidden_TE = self._target.forward(step, self._drafts.reads)
        kept_depths = tuple(self._synthetic.kept_depth(row.tree.drafted_depth) for row in choosing)
        outcome = None
        if choosing:
            outcome = self._accept(sampler, step, forest, logits_RV, ranked_BNK, kept_depths)
        self._keep(rows, step, roots_C, forest, outcome, aux_TA)
        return Launched(
            rows=rows,
            epochs=tuple(row.request.epoch for row in rows),
            choice=self._pilot.choice,
            size=size_of(rows, len(forest.levels)),
            outcome=outcome,
            ranked_BNK=ranked_BNK,
            emitted_told=tell_emitted(choosing, forest, logits_RV, outcome),
            prompts_told=tell_prompts(self._target.logits, rows, step.packed.query_start, hidden_TE),
            kept_depths=kept_depths,
            began_seconds=began,
            draft_seconds=drafted - began,
        )

    def collect(self, step: Launched) -> list[Tokens]:
        """Reads a step back: what it emitted, up to each request's end."""
        reads: list[Read | None] = list(step.read())
        reads += [None] * (len(step.rows) - len(reads))
        prompts = step.read_prompts()
        seconds, now = self._finish_step(step)
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
            synthetic=self._synthetic.knobs,
            guard=self._pilot.guard_cells(),
        )
        return build_report(self.identity, moment, self._recorder.statistics)

    def check(self) -> None:
        """The books of slots and blocks balance; cheap enough to run whenever idle."""
        self._scheduler.check()

    @property
    def _device(self) -> torch.device:
        return self._state.length_S.device

    def _next_rows(self, now: float) -> tuple[Row, ...]:
        self._account(now)
        rows = tuple(self._scheduler.next_batch(self._pilot.trees))
        for row in rows:
            if row.begins:
                self._recorder.admitted(row.request, now)
        tell_rows(self._state, rows)
        return rows

    def _sampler_of(self, choosing: Sequence[Row], forest: Forest, roots_C: Tensor) -> Sampler:
        requests = [row.request for row in choosing]
        slots_C = torch.tensor([request.slot for request in requests], dtype=torch.int64, device=self._device)
        bound = 1 + max((max(r.cached_bound, r.prefilled) for r in requests), default=0)
        texts = Texts(self._state.tokens_SP, slots_C, roots_C, bound)
        return self._make_sampler([request.law for request in requests], texts, forest, self._target.vocab_size)

    def _accept(
        self,
        sampler: Sampler,
        step: Pass,
        forest: Forest,
        logits_RV: Tensor,
        ranked_BNK: Tensor | None,
        kept_depths: tuple[int, ...],
    ) -> Outcome:
        """A row's tokens are what the pass has just read."""
        tokens_BN = torch.full_like(forest.parents_BN, -2)
        tokens_BN[step.batch_R, step.node_R] = step.packed.tokens_T[step.logit_rows_R]
        kept_B = torch.tensor(kept_depths, device=logits_RV.device) if self._synthetic.cuts else None
        at = step.batch_R, step.node_R, step.depth_R
        return sampler.accept(forest, tokens_BN, logits_RV, *at, ranked_BNK, kept_B)

    def _keep(
        self,
        rows: tuple[Row, ...],
        step: Pass,
        roots_C: Tensor,
        forest: Forest,
        outcome: Outcome | None,
        aux_TA: Tensor | None,
    ) -> None:
        """Chunks first: the draft's first slot of a chunk reads the ring before the chunk overwrites it."""
        chunks = [row for row in rows if row.is_chunk]
        follows = self._pilot.drafts_prompts
        if chunks and follows:
            self._drafts.prefill(chunks, None if aux_TA is None else aux_TA[-sum(row.count for row in chunks) :])
        keep_chunks(self._state, rows, step, aux_TA)
        if outcome is not None:
            keep_paths(self._state, self._target.cache, step, roots_C, forest, outcome, aux_TA)
        for row in rows:
            row.request.in_flight.append(row.most_tokens)
            row.request.draft.launched(0 if row.is_chunk and follows else row.most_tokens)
            if row.is_chunk:
                self._scheduler.publish(row.request, row.start + row.count)

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

    def _finish_step(self, step: Launched) -> tuple[float, float]:
        """(seconds that the step took, now). Pads it where a synthetic knob says so."""
        began = max(step.began_seconds, self._collected_seconds)
        nodes = max(row.tree.verified - 1 for row in step.rows)
        context = max(row.request.cached for row in step.rows)
        least = self._synthetic.least_seconds(len(step.rows), nodes, context)
        now = time.monotonic()
        if now - began < least:
            time.sleep(least - (now - began))
            now = time.monotonic()
        self._collected_seconds = now
        return now - began, now

    def _measure(self, step: Launched, seconds: float, emitted: int) -> None:
        passes = step.size.draft_passes
        if passes:
            each = step.draft_seconds / passes
            self._pass_seconds += 0.1 * (each - self._pass_seconds) if self._pass_seconds else each
        if step.choice.counted or step.size.prefill_tokens:
            self._recorder.step(step.choice.context, step.size, emitted, seconds)
        if step.size.prefill_tokens == 0 and step.size.sequences:
            self._pilot.measured(step.choice, seconds, emitted / step.size.sequences, self._pass_seconds)

    def _account(self, now: float) -> None:
        """Request-seconds, up to now, of what was running and waiting until now."""
        statistics, elapsed = self._recorder.statistics, now - self._accounted_seconds
        statistics.running_request_seconds += elapsed * len(self._scheduler.running)
        statistics.waiting_request_seconds += elapsed * len(self._scheduler.waiting)
        self._accounted_seconds = now
