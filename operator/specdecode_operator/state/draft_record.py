"""Records of the rollout of a deployment's drafts, and of its training runs. Pure.

What concerns one draft is stored in its SpecDecodeDraft and nowhere else (`rollout.draft_objects`). What concerns
training runs, and the pause after a rollout, is the entry ``training`` of the ConfigMap ``<name>-state``. If that is
lost, so is a run that was under way, and no draft.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from specdecode_operator.api.draft import Mode, Phase, TrialRecord
from specdecode_operator.api.v1alpha1 import DraftLineageStatus, DraftRunEndStatus
from specdecode_operator.state.learned import Stored

LINEAGE = 10
"""Number of candidates in the lineage."""
TRAINING_KEY = "training"
"""Entry of the ConfigMap."""


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


class TrainingRecord(Stored):
    """Part of a rollout that is stored in the ConfigMap: training runs, and the settings at its start."""

    phase: Phase = Phase.SERVING
    since: float = 0
    """Time when the phase began, or when a candidate that waits for a user was confirmed; in seconds of the epoch."""
    mode: Mode = Mode.CANARY
    spec_draft: str = ""
    """URI of the spec's draft when a candidate was last offered; empty before the first one."""
    method: str = ""
    """Method of that draft."""
    spec_hash: str = ""
    """Hash of that draft."""
    target: str = ""
    image: str = ""
    request: str = ""
    """Value of distillation.trigger.request that was carried out last."""
    last_verdict: str = ""
    refusal: str = ""
    """Reason why the latest candidate was not tried or could not be loaded; empty if there is none."""
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
    run: RunRecord | None = None
    undeleted_run: RunRecord | None = None
    """Run that ended without a verdict, so that its folder may hold captured text. ``retry_at`` is the time before
    which no Job deletes it, ``losses`` the number of such Jobs that failed, and ``reason`` that of the latest one."""
    last_run: DraftRunEndStatus | None = None


class DraftRecord(TrainingRecord):
    """The rollout of one deployment: its training runs, and the drafts that SpecDecodeDrafts stand for, by hash."""

    current: str = ""
    """Hash of the assigned draft; empty for that of the spec."""
    candidate: str = ""
    previous: str | None = None
    is_confirmed: bool = False
    canary_losses: int = 0
    uris: dict[str, str] = Field(default={})
    """URIs of the candidate, the current and the previous draft, by hash."""
    trial: TrialRecord | None = None
    lineage: tuple[DraftLineageStatus, ...] = ()

    def with_ended(self, entry: DraftLineageStatus) -> DraftRecord:
        """Return the record with the end of a candidate."""
        counts = self.candidate_outcomes
        counted = {**counts, entry.outcome: counts.get(entry.outcome, 0) + 1}
        others = (one for one in self.lineage if one.hash != entry.hash)
        return self.model_copy(update={"lineage": (entry, *others)[:LINEAGE], "candidate_outcomes": counted})

    @property
    def is_used(self) -> bool:
        """True once a candidate was taken up or a run was requested. Before, no draft is assigned."""
        return bool(self.spec_draft)

    @property
    def planned_draft(self) -> str:
        """Hash of the draft that the plan is for; empty where the majority of the reports decides."""
        is_open = self.phase in (Phase.CANARY, Phase.PROMOTING, Phase.ROLLING_BACK)
        return self.current or (self.spec_hash if is_open else "")


UNUSED = DraftRecord()


def render_training(record: DraftRecord) -> dict[str, str]:
    """Return the entry of the ConfigMap; none where no draft was ever offered or trained."""
    training = TrainingRecord(**{name: getattr(record, name) for name in TrainingRecord.model_fields})
    text = training.model_dump_json(by_alias=True, exclude_defaults=True)
    return {TRAINING_KEY: text} if record.is_used or record.request else {}


def parse_training(data: Mapping[str, str]) -> DraftRecord:
    """Return the record that ``render_training`` wrote, without drafts.

    Raises:
        ValueError: The entry cannot be read.
    """
    return DraftRecord.model_validate_json(data[TRAINING_KEY]) if TRAINING_KEY in data else UNUSED
