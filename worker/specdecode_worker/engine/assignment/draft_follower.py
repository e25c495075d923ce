"""Follower of the plan's assignment in the engine process: it replaces the default draft and runs the trial.

Drafts load in the thread of the DraftSwapQueue. Everything else happens between two steps of the engine loop. During a
trial both drafts stay loaded. That needs no more memory than a draft swap, which also holds two drafts and is refused
where they do not fit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING

from specdecode_worker.contract import DraftTrial, Plan, TrialState, WorkerConfig
from specdecode_worker.engine.assignment.assigned_draft import (
    DraftGoal,
    artifact_config,
    followed_assignment,
    stable_goal,
    trial_of,
    worker_name,
)
from specdecode_worker.engine.assignment.convergence import Convergence
from specdecode_worker.engine.assignment.default_draft import DefaultDraft
from specdecode_worker.engine.assignment.trial_run import TrialRun
from specdecode_worker.speculation.draft_trial import TrialSchedule

if TYPE_CHECKING:  # imported in the server process, which must not import torch
    from specdecode_worker.engine.drafts.draft_swap import DraftSwap

_REPLACED_BY_REQUEST = "a request to PUT /v1/draft replaced the draft during the trial"

log = logging.getLogger(__name__)


class _Load(Enum):
    """Purpose of a draft that the follower loads."""

    GOAL = auto()
    FALLBACK = auto()
    """Draft of the config, because the assigned one could not be loaded at start."""
    CANDIDATE = auto()


class DraftFollower:
    """Follower of one engine's assignment."""

    def __init__(
        self,
        draft: DefaultDraft,
        config: WorkerConfig,
        set_plan: Callable[[Plan], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a follower without an assignment.

        Args:
            draft: Default draft of the engine, which the follower replaces.
            config: Config of the worker, with the draft of the spec.
            set_plan: Function that puts a plan in force. It raises ValueError if the engine refuses the plan.
            clock: Monotonic clock.
        """
        self._draft, self._config, self._set_plan, self._clock = draft, config, set_plan, clock
        self._worker = worker_name()
        self._convergence = Convergence()
        self._load: _Load | None = None
        self._follows = False
        self._needs_fallback = False
        self._last_problem = ""
        self._run: TrialRun | None = None
        self._held: Plan | None = None

    @property
    def trial(self) -> TrialState | None:
        """Trial for the report; None if the plan assigns none to this worker."""
        return None if self._run is None else self._run.state()

    def start(self, plan: Plan | None, problem: str) -> None:
        """Follow the plan that the engine was started with.

        Args:
            plan: The plan, if any. The engine has it already.
            problem: Reason why the engine was started without the assigned draft; empty if it has it.
        """
        if plan is None:
            return
        self._follow(plan)
        goal = self._convergence.goal
        if problem and goal is not None:
            self._record_failure(problem)
        elif goal is not None and not self._draft.state.hash:
            self._needs_fallback = bool(goal.hash) and self._config.draft.method != "none"
            self._record_failure(self._draft.state.problem or "the assigned draft was not loaded")

    def take_plan(self, plan: Plan) -> None:
        """Take a plan, now or at the end of the pair that runs. Raise ValueError if the engine refuses it."""
        run = self._run
        if run is not None and run.block is not None and run.is_same(*self._assigned(plan)):
            self._held = plan
            return
        self._set_plan(plan)
        self._held = None
        self._follow(plan)

    def give_way(self) -> None:
        """Let the request of a client for another default draft pass. The next plan with an assignment ends it."""
        self._load, self._needs_fallback = None, False
        self._convergence.clear()
        if self._run is not None and not self._run.problem:
            self._fail_trial(_REPLACED_BY_REQUEST)
            self._convergence.clear()

    def take_swap(self, swap: DraftSwap) -> None:
        """Take a default draft that has loaded, or the reason why it has not."""
        load, self._load = self._load, None
        problem = self._draft.install(swap.loaded) if swap.loaded and load is not _Load.CANDIDATE else swap.problem
        if load is _Load.CANDIDATE and self._run is not None:
            self._begin_trial(self._run, swap)
        elif load is _Load.GOAL and problem:
            self._record_failure(problem)
        elif load is _Load.GOAL:
            self._convergence.clear()
        elif load is _Load.FALLBACK and not problem:
            self._draft.record_problem(f"the draft of the spec runs: {self._last_problem}")

    def advance(self) -> None:
        """Do what is due between two steps: the next block of a trial, or an attempt to load a draft."""
        run = self._run
        if run is not None and run.block is not None:
            if run.block.is_complete:
                run.schedule.end_block(run.block)
                self._next_block(run)
            return
        if self._load is not None:
            return
        if self._needs_fallback:
            self._needs_fallback = False
            self._begin(_Load.FALLBACK, DraftGoal(self._config.draft.model_copy(update={"required": False})))
        elif self._convergence.is_due(self._clock()):
            self._converge()
        elif run is not None and run.is_loading and self._convergence.goal is None:
            candidate = run.schedule.trial.candidate
            self._begin(_Load.CANDIDATE, DraftGoal(artifact_config(candidate, self._config), candidate.hash))

    def _assigned(self, plan: Plan) -> tuple[DraftTrial | None, DraftGoal]:
        """Return the trial and the stable draft that a plan assigns to this worker."""
        assignment = followed_assignment(plan, self._config)
        if assignment is None:
            return None, DraftGoal(self._config.draft)
        return trial_of(assignment, self._worker), stable_goal(assignment, self._config)

    def _follow(self, plan: Plan) -> None:
        """Follow the assignment of a plan that is in force: end or begin a trial, and aim for the stable draft."""
        trial, goal = self._assigned(plan)
        run = self._run
        if run is not None and not run.is_same(trial, goal):
            self._leave_trial(goal)
            run = None
        follows = followed_assignment(plan, self._config) is not None
        if not follows and not self._follows:
            return  # a draft that a person has put there stays
        self._follows = follows
        if run is None and trial is not None:
            self._run = TrialRun(TrialSchedule(trial), goal)
        if self._load is not _Load.CANDIDATE:
            self._aim(goal)

    def _aim(self, goal: DraftGoal) -> None:
        """Make a draft the goal, unless it runs and no other one is loading to replace it."""
        if goal.is_met(self._draft.state) and not self._draft.is_replaced(goal):
            self._convergence.clear()
        else:
            self._convergence.aim(goal, self._clock())
            if self._load is _Load.GOAL and self._draft.is_replaced(goal):
                self._load = None  # it loads the goal before, which the next attempt replaces

    def _converge(self) -> None:
        """Start to load the goal, or clear it if it runs already."""
        goal = self._convergence.goal
        assert goal is not None
        if goal.is_met(self._draft.state):
            if self._draft.is_replaced(goal):
                self._draft.cancel()
            self._convergence.clear()
        else:
            self._begin(_Load.GOAL, goal)

    def _begin(self, load: _Load, goal: DraftGoal) -> None:
        """Start to load a draft. It replaces one that is loading."""
        problem = self._draft.begin(goal)
        if not problem:
            self._load = load
        elif load is _Load.CANDIDATE:
            self._fail_trial(problem)
        elif load is _Load.GOAL:
            self._record_failure(problem)

    def _begin_trial(self, run: TrialRun, swap: DraftSwap) -> None:
        """Begin the first block with the candidate that has loaded, or end the trial with the reason of its failure."""
        run.incumbent, run.candidate = self._draft.loaded, swap.loaded
        if run.candidate is None:
            self._fail_trial(swap.problem)
        elif run.incumbent is None:
            self._fail_trial("no incumbent: this worker runs without a draft")
        else:
            self._next_block(run)

    def _next_block(self, run: TrialRun) -> None:
        """Install the draft of the next block and begin it. Between pairs, a held plan is put in force first.

        The draft is installed also if it runs already, so that guard, caches and burn-in are alike in both blocks.
        """
        if run.schedule.is_between_pairs:
            self._take_held(run)
        if problem := self._draft.install(run.next_draft):
            self._fail_trial(problem)
            return
        run.block = run.schedule.new_block()
        self._draft.set_block(run.block)

    def _take_held(self, run: TrialRun) -> None:
        """Put the plan in force that has waited for the end of the pair, if there is one."""
        plan, self._held = self._held, None
        if plan is None:
            return
        trial, _ = self._assigned(plan)
        assert trial is not None, "a plan that ends the trial does not wait"
        run.schedule.trial = trial
        try:
            self._set_plan(plan)
        except ValueError as error:
            log.warning("the plan that waited for the end of a pair is refused: %s", error)

    def _fail_trial(self, problem: str) -> None:
        """End the trial for a reason, and return to the incumbent."""
        run = self._run
        assert run is not None
        log.warning("the trial %s has failed: %s", run.schedule.trial.id, problem)
        self._stop(run, run.stable)
        run.fail(problem)
        self._take_held(run)

    def _leave_trial(self, goal: DraftGoal) -> None:
        """End the trial because the plan does, and run the new goal if the trial has it loaded, else the incumbent."""
        run = self._run
        assert run is not None
        self._run = None
        self._stop(run, goal)

    def _stop(self, run: TrialRun, goal: DraftGoal) -> None:
        """End the blocks of a trial and install ``goal`` or the incumbent, whichever is loaded."""
        if self._load is _Load.CANDIDATE:
            self._draft.cancel()
            self._load = None
        if run.block is None:
            return
        self._draft.set_block(None)
        chosen = next((draft for draft in run.loaded if goal.is_met(draft.state)), run.loaded[0])
        if chosen is not self._draft.loaded and self._draft.install(chosen):
            self._convergence.aim(goal, self._clock())

    def _record_failure(self, problem: str) -> None:
        """Record a failed attempt to reach the goal. A trial cannot begin without its incumbent."""
        self._last_problem = problem
        self._draft.record_problem(problem)
        self._convergence.record_failure(self._clock())
        if self._run is not None and self._run.is_loading:
            self._fail_trial(f"the incumbent cannot be loaded: {problem}")
