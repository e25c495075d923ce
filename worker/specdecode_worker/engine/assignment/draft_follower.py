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
from typing import TYPE_CHECKING, Protocol

from specdecode_worker.contract import DraftConfig, DraftState, DraftTrial, Plan, TrialState, WorkerConfig
from specdecode_worker.engine.assignment.assigned_draft import (
    DraftGoal,
    artifact_config,
    followed_assignment,
    stable_goal,
    trial_of,
    worker_name,
)
from specdecode_worker.engine.assignment.convergence import Convergence
from specdecode_worker.engine.assignment.trial_run import TrialRun
from specdecode_worker.engine.drafts.draft_swap import DraftSwap, DraftSwapQueue
from specdecode_worker.engine.ipc.messages import SetDraft
from specdecode_worker.models.errors import ModelError
from specdecode_worker.speculation.draft_trial import TrialSchedule
from specdecode_worker.speculation.trial_costs import BlockCosts

if TYPE_CHECKING:  # imported in the server process, which must not import torch
    from specdecode_worker.engine.drafts.draft_registry import LoadedDraft

_DEFAULT_DRAFT = ""
_REPLACED_BY_REQUEST = "a request to PUT /v1/draft replaced the draft during the trial"

log = logging.getLogger(__name__)


class FollowedEngine(Protocol):
    """Engine as the follower sees it."""

    @property
    def draft(self) -> DraftState:
        """State of the default draft."""
        ...

    def loaded_draft(self) -> LoadedDraft | None:
        """Return the default draft, or None if it is not loaded."""
        ...

    def set_plan(self, plan: Plan) -> None:
        """Replace the plan. Raise ValueError if the engine refuses it."""
        ...

    def set_block(self, block: BlockCosts | None) -> None:
        """Begin a block of a trial; None ends the trial."""
        ...


class _Load(Enum):
    """Reason why a default draft is loading."""

    REQUEST = auto()
    """A client of the admin port asked for it."""
    GOAL = auto()
    FALLBACK = auto()
    """The draft of the config, because the assigned one could not be loaded at start."""
    CANDIDATE = auto()


class DraftFollower:
    """Follower of one engine's assignment."""

    def __init__(
        self,
        engine: FollowedEngine,
        swaps: DraftSwapQueue,
        config: WorkerConfig,
        install: Callable[[LoadedDraft], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a follower without an assignment.

        Args:
            engine: Engine whose default draft is replaced.
            swaps: Queue that loads drafts.
            config: Config of the worker, with the draft of the spec.
            install: Function that passes a loaded draft to the engine. It raises ModelError if that fails.
            clock: Monotonic clock.
        """
        self._engine, self._swaps, self._config = engine, swaps, config
        self._install, self._clock = install, clock
        self._worker = worker_name()
        self._convergence = Convergence()
        self._load = _Load.REQUEST
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
        elif goal is not None and not self._engine.draft.hash:
            self._needs_fallback = bool(goal.hash) and self._config.draft.method != "none"
            self._record_failure(self._engine.draft.problem or "the assigned draft was not loaded")

    def take_plan(self, plan: Plan) -> None:
        """Take a plan, now or at the end of the pair that runs. Raise ValueError if the engine refuses it."""
        run = self._run
        if run is not None and run.block is not None and run.is_same(*self._assigned(plan)):
            self._held = plan
            return
        self._engine.set_plan(plan)
        self._held = None
        self._follow(plan)

    def give_way(self) -> None:
        """Let the request of a client for another default draft pass. The next plan with an assignment ends it."""
        self._load, self._needs_fallback = _Load.REQUEST, False
        self._convergence.clear()
        if self._run is not None and not self._run.problem:
            self._fail_trial(_REPLACED_BY_REQUEST)
            self._convergence.clear()

    def take_swap(self, swap: DraftSwap) -> None:
        """Take a default draft that has loaded, or the reason why it has not."""
        load, self._load = self._load, _Load.REQUEST
        problem = self._try_install(swap.loaded) if swap.loaded and load is not _Load.CANDIDATE else swap.problem
        if load is _Load.CANDIDATE and self._run is not None:
            self._begin_trial(self._run, swap)
        elif load is _Load.GOAL and problem:
            self._record_failure(problem)
        elif load is _Load.GOAL:
            self._convergence.clear()
        elif load is _Load.FALLBACK and not problem:
            self._swaps.record_problem(_DEFAULT_DRAFT, f"the draft of the spec runs: {self._last_problem}")

    def advance(self) -> None:
        """Do what is due between two steps: the next block of a trial, or an attempt to load a draft."""
        run = self._run
        if run is not None and run.block is not None:
            if run.block.is_complete:
                run.schedule.end_block(run.block)
                self._next_block(run)
            return
        if self._load is not _Load.REQUEST:
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
        if goal.is_met(self._engine.draft) and not self._is_replaced(goal):
            self._convergence.clear()
        else:
            self._convergence.aim(goal, self._clock())
            if self._load is _Load.GOAL and self._is_replaced(goal):
                self._load = _Load.REQUEST  # it loads the goal before, which the next attempt replaces

    def _is_replaced(self, goal: DraftGoal) -> bool:
        """Return whether another default draft than ``goal`` is loading."""
        pending = self._swaps.pending_draft(_DEFAULT_DRAFT)
        return pending is not None and (pending.hash, pending.uri) != (goal.hash, goal.config.uri or "")

    def _converge(self) -> None:
        """Start to load the goal, or clear it if it runs already."""
        goal = self._convergence.goal
        assert goal is not None
        if goal.is_met(self._engine.draft):
            if self._is_replaced(goal):
                self._swaps.cancel(_DEFAULT_DRAFT)
            self._convergence.clear()
        else:
            self._begin(_Load.GOAL, goal)

    def _begin(self, load: _Load, goal: DraftGoal) -> None:
        """Start to load a default draft. It replaces one that is loading."""
        try:
            self._swaps.begin(SetDraft(0, _json(goal.config), _DEFAULT_DRAFT, goal.hash))
        except ModelError as error:
            if load is _Load.CANDIDATE:
                self._fail_trial(str(error))
            elif load is _Load.GOAL:
                self._record_failure(str(error))
            return
        self._load = load

    def _begin_trial(self, run: TrialRun, swap: DraftSwap) -> None:
        """Begin the first block with the candidate that has loaded, or end the trial with the reason of its failure."""
        run.incumbent, run.candidate = self._engine.loaded_draft(), swap.loaded
        if run.candidate is None:
            self._fail_trial(swap.problem)
        elif run.incumbent is None:
            self._fail_trial("no incumbent: this worker runs without a draft")
        else:
            self._next_block(run)

    def _next_block(self, run: TrialRun) -> None:
        """Install the draft of the next block and begin it, after a plan that waited for the end of the pair.

        The draft is installed also if it runs already, so that guard, caches and burn-in are alike in both blocks.
        """
        if run.schedule.is_between_pairs:
            self._take_held(run)
        if problem := self._try_install(run.next_draft):
            self._fail_trial(problem)
            return
        run.block = run.schedule.new_block()
        self._engine.set_block(run.block)

    def _take_held(self, run: TrialRun) -> None:
        """Put the plan in force that has waited for the end of the pair, if there is one."""
        plan, self._held = self._held, None
        if plan is None:
            return
        trial, _ = self._assigned(plan)
        assert trial is not None, "a plan that ends the trial does not wait"
        run.schedule.trial = trial
        try:
            self._engine.set_plan(plan)
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
            self._swaps.cancel(_DEFAULT_DRAFT)
            self._load = _Load.REQUEST
        if run.block is None:
            return
        self._engine.set_block(None)
        chosen = next((draft for draft in run.loaded if goal.is_met(draft.state)), run.loaded[0])
        if chosen is not self._engine.loaded_draft() and self._try_install(chosen):
            self._convergence.aim(goal, self._clock())

    def _try_install(self, loaded: LoadedDraft) -> str:
        """Pass a draft to the engine. Return the reason if it cannot be used; the report then shows it too."""
        try:
            self._install(loaded)
        except ModelError as error:
            self._swaps.record_problem(_DEFAULT_DRAFT, str(error))
            return str(error)
        return ""

    def _record_failure(self, problem: str) -> None:
        """Record a failed attempt to reach the goal. A trial cannot begin without its incumbent."""
        self._last_problem = problem
        self._swaps.record_problem(_DEFAULT_DRAFT, problem)
        self._convergence.record_failure(self._clock())
        if self._run is not None and self._run.is_loading:
            self._fail_trial(f"the incumbent cannot be loaded: {problem}")


def _json(config: DraftConfig) -> bytes:
    return config.model_dump_json(exclude={"name"}).encode()
