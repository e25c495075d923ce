"""Series of training runs, of the candidates that ended, and of captured requests."""

from __future__ import annotations

from specdecode_operator.gauges import DeploymentGauge
from specdecode_operator.types import Deployment, Observation

_OF_DEPLOYMENT = ["namespace", "name"]

DRAFT_RUNS = DeploymentGauge(
    "specdecode_draft_runs", "Training runs that ended, by outcome.", [*_OF_DEPLOYMENT, "outcome"]
)
CANDIDATES = DeploymentGauge(
    "specdecode_draft_candidates", "Candidate drafts that ended, by outcome.", [*_OF_DEPLOYMENT, "outcome"]
)
RUNS_NOT_BETTER = DeploymentGauge(
    "specdecode_draft_runs_not_better", "Verdicts of training runs in a row that were not better.", _OF_DEPLOYMENT
)
CAPTURED = DeploymentGauge(
    "specdecode_captured_conversations", "Captured conversations of all workers.", _OF_DEPLOYMENT
)


def record_runs(deployment: Deployment, observed: Observation) -> None:
    """Set the series of one deployment. Those of runs are absent until one ended, and those of captures without any."""
    key, record = deployment.key, observed.session.drafts
    for outcome, count in record.candidate_outcomes.items():
        CANDIDATES.set((*key, outcome), count)
    for outcome, count in record.run_outcomes.items():
        DRAFT_RUNS.set((*key, outcome), count)
    if record.run_outcomes:
        RUNS_NOT_BETTER.set(key, record.runs_not_better)
    captures = [report.capture for report in observed.last_reports if report.capture is not None]
    if deployment.spec.distillation.capture is not None and captures:
        CAPTURED.set(key, sum(capture.conversations for capture in captures))
    else:
        CAPTURED.remove(*key)
