"""Draft that a worker should run according to its plan and its config.

The server process imports this module, so it must not import torch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specdecode_worker.contract import (
    Artifact,
    DraftAssignment,
    DraftConfig,
    DraftState,
    DraftTrial,
    Env,
    Plan,
    WorkerConfig,
)
from specdecode_worker.engine.drafts.draft_hash import draft_hash
from specdecode_worker.engine.drafts.draft_problem import describe_failure


@dataclass(frozen=True, slots=True)
class DraftGoal:
    """Draft that should run. ``hash`` is empty for the draft of the worker's config, which may have any hash."""

    config: DraftConfig
    hash: str = ""

    def is_met(self, running: DraftState) -> bool:
        """Return whether the running draft is this one. A config without a draft is met by any."""
        if self.hash:
            return running.hash == self.hash
        if self.config.method == "none":
            return True
        return bool(running.hash) and (running.method, running.uri) == (self.config.method, self.config.uri or "")


@dataclass(frozen=True, slots=True)
class StartDraft:
    """Config to start a worker with, and the reason why the assigned draft is not in it; empty without one."""

    config: WorkerConfig
    problem: str = ""


def worker_name() -> str:
    """Return the name of this worker in reports: that of its pod, else of its host."""
    return os.environ.get(Env.pod_name) or socket.gethostname()


def followed_assignment(plan: Plan, config: WorkerConfig) -> DraftAssignment | None:
    """Return the assignment of a plan; None if it has none, or one for another spec draft or target."""
    assignment = plan.assignment
    own = (config.draft.uri or "", config.model.uri)
    return assignment if assignment is not None and (assignment.spec_draft, assignment.target) == own else None


def trial_of(assignment: DraftAssignment, worker: str) -> DraftTrial | None:
    """Return the trial that this worker has to run, or None."""
    trial = assignment.trial
    return trial if trial is not None and trial.pod == worker else None


def stable_goal(assignment: DraftAssignment, config: WorkerConfig) -> DraftGoal:
    """Return the goal of an assignment apart from its trial."""
    stable = assignment.stable
    return DraftGoal(config.draft) if stable is None else DraftGoal(artifact_config(stable, config), stable.hash)


def assigned_uris(plan: Plan, config: WorkerConfig, worker: str) -> tuple[str, ...]:
    """Return the URIs of the artefacts that a plan assigns to this worker: the stable draft and its candidate."""
    assignment = followed_assignment(plan, config)
    if assignment is None:
        return ()
    trial = trial_of(assignment, worker)
    artifacts = (assignment.stable, None if trial is None else trial.candidate)
    return tuple(artifact.uri for artifact in artifacts if artifact is not None)


def artifact_config(artifact: Artifact, config: WorkerConfig) -> DraftConfig:
    """Return the configuration of an artefact: an EAGLE-3 head, quantised and placed as the draft of the config is.

    An artefact at the URI of the config's draft is loaded as that draft.
    """
    if artifact.uri == config.draft.uri:
        return config.draft.model_copy(update={"required": False})
    quantization = config.draft.quantization if config.draft.method == "eagle3" else None
    placement = config.draft.placement
    return DraftConfig(method="eagle3", uri=artifact.uri, quantization=quantization, placement=placement)


def start_draft(config: WorkerConfig, plan: Plan | None, resolve: Callable[[str], Path]) -> StartDraft:
    """Return the config with the assigned draft, or the unchanged one if the artefact is absent or another one."""
    assignment = None if plan is None else followed_assignment(plan, config)
    if assignment is None or not (goal := stable_goal(assignment, config)).hash:
        return StartDraft(config)
    uri = goal.config.uri or ""
    try:
        actual = draft_hash(goal.config, resolve)
    except BaseException as error:  # a panic of a Rust library is not an Exception
        return StartDraft(config, describe_failure(error, uri))
    if actual != goal.hash:
        return StartDraft(config, f"{uri} has the hash {actual}, and the plan assigns the draft with hash {goal.hash}")
    return StartDraft(config.model_copy(update={"draft": goal.config}))
