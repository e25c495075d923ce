"""SpecDecodeDraft, version v1alpha1: one draft of a deployment, from its offer to its end.

``spec`` says what should become of it, and is enough to restore what serves. ``status`` is the only record of its trial
and its end. It has no owner reference: like a claim, it outlives its deployment.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from specdecode_operator.api.distillation import DraftHash
from specdecode_operator.api.schema import URI_FORMS, Anything, Api, ModelUri, NameRef, Text, named_list, rule, rules
from specdecode_operator.api.status import Condition, DraftRunEndStatus, Outcome

DRAFT_KIND = "SpecDecodeDraft"
DRAFT_PLURAL = "specdecodedrafts"
DRAFT_SHORT_NAME = "sddr"
UNRESOLVED = "by-uri-"
"""Beginning of the id of a draft whose hash nobody knows yet."""

Role = Literal["Candidate", "Serving", "Retired"]
DraftPhase = Literal["Waiting", "Canary", "Promoting", "Serving", "RollingBack", "Retired"]


class DraftBase(Api):
    """Model and draft that a draft was compared with. It is retired once the deployment has another of either."""

    target: Text
    """Model, with its adapter: spec.model of the deployment."""
    draft: Text
    """URI of the deployment's own draft: its spec.speculation.draft.uri."""
    method: Text
    """Method of both drafts."""
    hash: Text = ""
    """Hash of the deployment's own draft."""


class DraftResourceSpec(Api):
    """Source and intended role of a draft."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("self.deploymentRef == oldSelf.deploymentRef", "deploymentRef cannot change: create another draft"),
            rule("self.uri == oldSelf.uri", "uri cannot change: create another draft"),
            rule("!has(oldSelf.hash) || (has(self.hash) && self.hash == oldSelf.hash)", "hash cannot change"),
            rule("self.role != 'Serving' || has(self.hash)", "role Serving needs the hash"),
        )
    )

    deployment_ref: NameRef = Field(examples=[{"name": "llama"}])
    """SpecDecodeDeployment that uses the draft, in the same namespace."""
    uri: ModelUri = Field(
        description=f"Where the draft comes from: {URI_FORMS}. It must be readable as long as the draft is used.",
        examples=["pvc://drafts/week-47"],
    )
    hash: DraftHash | None = Field(default=None, examples=["4f1c9a7be2d05c6e"])
    """Hash of the draft's files. Workers refuse files with another one. Absent: the operator writes that of the first
    worker's files."""
    role: Role = "Candidate"
    """Candidate: the draft is tried. Serving: all workers load it, without a trial if it had none. Retired: its trial
    ends; if it serves, the one before it returns. The operator writes Serving and Retired; leave the field out in git
    until then."""
    replaces: DraftHash | None = Field(default=None, examples=["4f1c9a7be2d05c6e"])
    """Hash of the draft that serves again if this one is retired; written by the operator. Absent: the deployment's own
    draft."""
    base: DraftBase | None = Field(
        default=None, examples=[{"target": "pvc://models/llama", "draft": "pvc://drafts/first", "method": "eagle3"}]
    )
    """Model and draft that this one was compared with; written by the operator. Another one of either in the deployment
    retires it. Absent: those of the deployment."""


class CountedPair(Api):
    """Differences of one pair of blocks in log cost per token; positive where the candidate is faster."""

    total: float
    """Difference over all tasks."""
    tasks: dict[str, float] = Field(default={})
    """Difference by task."""


class TrialRecord(Api):
    """Trial of a candidate. Its settings are those of its beginning, because changed ones would void its guarantee."""

    id: Text = ""
    """Name of the trial on its pod. Absent: no pod is ready for it."""
    block_requests: int
    """Finished requests of a block."""
    min_gain: float
    """Gain that a promotion must exceed, as a share."""
    pod: Text = ""
    """Pod that tries the candidate. Absent: none is ready for it."""
    pod_uid: Text = ""
    """Uid of that pod."""
    boot: Text = ""
    """Start of its worker. Another one means that the worker was lost."""
    first_pair: int = 0
    """Index of the first pair of this pod."""
    next_pair: int = 0
    """Index after the last pair that was counted."""
    pairs: tuple[CountedPair, ...] = ()
    """Counted pairs, in their order."""


class DraftResourceStatus(Api):
    """Phase and outcome of a draft, with the measurements behind them."""

    phase: DraftPhase | None = None
    """Waiting: for a worker, or for another trial; Canary: one worker tries it; Promoting: the workers load it;
    Serving; RollingBack: the workers return to the one before; Retired."""
    since: Text | None = None
    """Time when the phase began."""
    outcome: Outcome | None = None
    """End of its trial or promotion. Absent: there was none yet."""
    outcome_time: Text | None = None
    """Time of the outcome."""
    reason: Text = ""
    """Reason of phase or outcome in a sentence, with numbers."""
    pairs: int = 0
    """Pairs of request blocks that were counted."""
    gain_percent: float | None = None
    """Mean gain in speed of these pairs, in percent."""
    least_gain_percent: float | None = None
    """Lower bound of the gain, valid at any time with 97.5 % confidence, in percent. Absent: too few pairs."""
    most_gain_percent: float | None = None
    """Upper bound, likewise."""
    is_confirmed: bool = False
    """Whether the trial allows the promotion."""
    canary_losses: int = 0
    """Times that the worker of the trial was lost."""
    trial: TrialRecord | None = None
    """Trial that runs now, with its evidence."""
    evaluation: DraftRunEndStatus | None = None
    """Verdict of the training run that made it. Absent: a user offered it."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=4, json_schema_extra=named_list("type"))] = ()
    """Serving: whether the workers run the draft, and why not."""


class SpecDecodeDraft(Api):
    """One draft of a SpecDecodeDeployment."""

    metadata: Anything
    spec: DraftResourceSpec
    status: DraftResourceStatus = DraftResourceStatus()

    @property
    def name(self) -> str:
        return str(self.metadata["name"])

    @property
    def uid(self) -> str:
        return str(self.metadata.get("uid", ""))

    @property
    def id(self) -> str:
        """Hash of the draft, or a name of its URI until a worker reports the hash."""
        return self.spec.hash or UNRESOLVED + hashlib.sha256(self.spec.uri.encode()).hexdigest()[:12]

    @property
    def is_offered(self) -> bool:
        """True if the draft waits for a trial or a promotion that has not begun."""
        return self.spec.role != "Retired" and self.status.phase in (None, "Waiting", "RollingBack", "Retired")


DRAFT_COLUMNS: tuple[dict[str, Any], ...] = (
    {"name": "Deployment", "type": "string", "jsonPath": ".spec.deploymentRef.name"},
    {"name": "Phase", "type": "string", "jsonPath": ".status.phase"},
    {"name": "Outcome", "type": "string", "jsonPath": ".status.outcome"},
    {"name": "Pairs", "type": "integer", "jsonPath": ".status.pairs"},
    {"name": "Gain", "type": "number", "jsonPath": ".status.gainPercent"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    {"name": "Reason", "type": "string", "jsonPath": ".status.reason"},
    {"name": "URI", "type": "string", "jsonPath": ".spec.uri", "priority": 1},
    {"name": "Hash", "type": "string", "jsonPath": ".spec.hash", "priority": 1},
)
"""Columns of ``kubectl get``; those of priority 1 only with ``-o wide``."""


# Phases of a deployment's drafts, and ways of a candidate into service.


class Phase(StrEnum):
    """Phase of a deployment's drafts."""

    SERVING = "Serving"
    COLLECTING = "Collecting"
    DISTILLING = "Distilling"
    CANARY = "Canary"
    PROMOTING = "Promoting"
    ROLLING_BACK = "RollingBack"
    COOLDOWN = "Cooldown"


class Mode(StrEnum):
    """Way of a candidate into service (spec: draftRollout.mode)."""

    CANARY = "Canary"
    DIRECT = "Direct"
    """The verdict of the training Job is enough."""
    MANUAL = "Manual"
    """A user promotes, once the canary test says that the candidate is better."""
