"""Stored rollout of a deployment's drafts: the entry ``drafts`` of the ConfigMap ``<name>-state``, as JSON. Pure.

If it cannot be read, the draft of the spec serves, and ``problem`` says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from pydantic import Field

from specdecode_operator.api.v1alpha1 import DraftLineageStatus, DraftRunEndStatus
from specdecode_operator.drafts.lifecycle import Lifecycle, Mode, Phase
from specdecode_operator.state.learned import Stored

LINEAGE = 10
"""Number of candidates in the lineage; status shows all of them."""
DRAFTS_KEY = "drafts"
"""Entry of the ConfigMap."""
_LIFECYCLE = tuple(field.name for field in fields(Lifecycle))


class CountedPair(Stored):
    """Differences of one pair in log cost per token; positive where the candidate is faster."""

    total: float
    tasks: dict[str, float] = Field(default={})


class PairEvidence(Stored):
    """Logs of the two e-processes of a trial by tilt, after the counted pairs (`drafts.crossover.Evidence`)."""

    above: tuple[float, ...]
    below: tuple[float, ...]


class TrialRecord(Stored):
    """Trial of a candidate. Its settings are those of its beginning, because changed ones would void its guarantee."""

    id: str = ""
    """Name of the trial on its pod; empty while none is ready for it."""
    started_at: float
    block_requests: int
    max_pairs: int
    min_gain: float
    """Gain that a promotion must exceed, as a share."""
    pod: str = ""
    """Name of the pod that tries the candidate; empty while none is ready for it."""
    pod_uid: str = ""
    boot: str = ""
    """``boot_id`` of its worker. Another one means that the worker was lost."""
    first_pair: int = 0
    """Index of the first pair for this pod."""
    next_pair: int = 0
    """Index after the last pair that was counted. Lower indices are not counted again."""
    pairs: tuple[CountedPair, ...] = ()
    """Pairs that shared a cell, in the order in which they were counted."""
    evidence: PairEvidence | None = None
    """Evidence of all tasks together after ``pairs``; None before the first one."""
    task_evidence: dict[str, PairEvidence] = Field(default={})


class RunRecord(Stored):
    """Training run that is under way."""

    id: str
    """Time of its beginning in hexadecimal digits. It names the Job and the run's folder, so it is never used twice."""
    started: float
    reason: str = ""
    draft_uri: str = ""
    """Draft that the run goes on from."""
    claim: str = ""
    """Claim with the run's folder and the new draft; empty with a bucket."""
    bucket: str = ""
    """URI below which new drafts lie in a bucket; empty with a claim."""
    endpoint: str = ""
    """URL of the bucket's store; empty for that of AWS."""
    loss: float = 0.0
    """Share of decode device time that a stale draft costs; 0 if the run has another reason."""
    job_uid: str = ""
    """Uid of the Job once it was seen. With a uid and without that Job, the Job is lost."""
    losses: int = 0
    """Jobs that were lost."""
    retry_at: float = 0.0
    """Time before which no Job is created."""

    @property
    def place(self) -> str:
        """URI below which new drafts lie."""
        return self.bucket or f"pvc://{self.claim}"


class DraftRecord(Stored):
    """Everything about the drafts of one deployment that survives a restart of the operator."""

    phase: Phase = Phase.SERVING
    mode: Mode = Mode.CANARY
    current: str = ""
    """Hash of the assigned draft; empty for that of the spec."""
    candidate: str = ""
    previous: str | None = None
    is_confirmed: bool = False
    canary_losses: int = 0
    failure_limit: int = 3
    paused: bool = False
    since: float = 0
    """Time when the phase began, or when a candidate that waits for a user was confirmed; in seconds of the epoch."""
    uris: dict[str, str] = Field(default={})
    """URIs of the candidate, the current and the previous draft, by hash."""
    spec_draft: str = ""
    """URI of the spec's draft when a candidate was last offered; empty before the first one."""
    method: str = ""
    """Method of that draft."""
    spec_hash: str = ""
    """Hash of that draft."""
    target: str = ""
    image: str = ""
    offered: str = ""
    """Candidate of the spec that was taken up: ``<hash> <uri>``."""
    request: str = ""
    """Value of distillation.trigger.request that was carried out last."""
    trials: int = 0
    """Number of pods that were chosen for trials so far."""
    last_verdict: str = ""
    refusal: str = ""
    """Reason why the latest candidate was not tried or could not be loaded; empty if there is none."""
    problem: str = ""
    """Reason why the stored life cycle could not be read. It stays until another candidate is taken up."""
    captures_deleted_before: float = 0
    """Time before which captured requests are deleted, in seconds of the epoch."""
    run_refusal: str = ""
    """Reason why the latest request to train was refused; empty if it was not."""
    run_device_seconds: float = 0.0
    """Device seconds of the latest run with a verdict; 0 before the first one."""
    recovery: float | None = None
    """Share of the loss that the latest better draft recovers, by its verdict. None before the first one."""
    candidate_outcomes: dict[str, int] = Field(default={})
    """Candidates that ended, by outcome."""
    run_outcomes: dict[str, int] = Field(default={})
    """Runs that ended, by outcome."""
    runs_not_better: int = 0
    """Verdicts in a row that were not better."""
    trial: TrialRecord | None = None
    run: RunRecord | None = None
    undeleted_run: RunRecord | None = None
    """Run that ended without a verdict, so that its folder may hold captured text. ``retry_at`` is the time before
    which no Job deletes it, ``losses`` the number of such Jobs that failed, and ``reason`` that of the latest one."""
    last_run: DraftRunEndStatus | None = None
    lineage: tuple[DraftLineageStatus, ...] = ()

    def with_ended(self, entry: DraftLineageStatus) -> DraftRecord:
        """Return the record with the end of a candidate."""
        counts = self.candidate_outcomes
        counted = {**counts, entry.outcome: counts.get(entry.outcome, 0) + 1}
        return self.model_copy(update={"lineage": (entry, *self.lineage)[:LINEAGE], "candidate_outcomes": counted})

    @property
    def lifecycle(self) -> Lifecycle:
        """State of the life cycle."""
        return Lifecycle(**{name: getattr(self, name) for name in _LIFECYCLE})

    def moved(self, state: Lifecycle) -> DraftRecord:
        """Return the record with another state of the life cycle."""
        return self.model_copy(update={name: getattr(state, name) for name in _LIFECYCLE})

    @property
    def is_used(self) -> bool:
        """True once a candidate was offered or a run was requested. Before, no draft is assigned."""
        return bool(self.spec_draft)

    @property
    def is_stored(self) -> bool:
        """True if there is anything to store: a rollout, a problem, or a request that must not be carried out again."""
        return self.is_used or bool(self.request or self.problem)

    @property
    def planned_draft(self) -> str:
        """Hash of the draft that the plan is for; empty where the majority of the reports decides."""
        is_open = self.phase in (Phase.CANARY, Phase.PROMOTING, Phase.ROLLING_BACK)
        return self.current or (self.spec_hash if is_open else "")


UNUSED = DraftRecord()


def render_drafts(record: DraftRecord) -> dict[str, str]:
    """Return the entry of the ConfigMap; none where no draft was ever offered or trained."""
    text = record.model_dump_json(by_alias=True, exclude_defaults=True)
    return {DRAFTS_KEY: text} if record.is_stored else {}


def parse_drafts(data: Mapping[str, str]) -> DraftRecord:
    """Return the record that ``render_drafts`` wrote. One that cannot be read says so in ``problem``."""
    if DRAFTS_KEY not in data:
        return UNUSED
    try:
        return DraftRecord.model_validate_json(data[DRAFTS_KEY])
    except ValueError as error:
        return UNUSED.model_copy(update={"problem": " ".join(str(error).split())[:1000]})
