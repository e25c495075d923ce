"""Conditions of a deployment, their reasons, and what to do about each.

docs/reference/conditions-and-alerts.md is generated from this list. A reason that the code can give and that is not
listed here fails a test.
"""

from __future__ import annotations

from typing import NamedTuple

from specdecode_operator.api.status import ConditionType


class ConditionReason(NamedTuple):
    """Reason of a condition. ``meaning`` and ``action`` are sentences without a full stop."""

    condition: ConditionType
    status: str
    reason: str
    meaning: str
    action: str


CONDITIONS: dict[ConditionType, str] = {
    ConditionType.ready: (
        "the current spec is observed, everything is applied, the rollout is finished, and all wanted workers are"
        " available. Else it is False with the reason of Stalled or Reconciling"
    ),
    ConditionType.available: "at least one worker serves requests, also while Ready is False",
    ConditionType.stalled: "nothing moves until a person acts; the message names the object. Absent otherwise",
    ConditionType.reconciling: (
        "the operator or Kubernetes is moving the deployment towards its spec. Absent otherwise"
    ),
    ConditionType.progressing: "workers are being started, replaced or removed",
    ConditionType.memory_fits: "the model fits in the memory, by arithmetic before it is loaded",
    ConditionType.draft_compatible: "the draft fits the target",
    ConditionType.draft_rollout: "a draft is trained, tried, promoted or rolled back",
    ConditionType.draft_fresh: "no task became slower than its baseline",
    ConditionType.speculation_effective: "speculation is faster than decoding without it, by measurement at equal load",
    ConditionType.scaling_limited: "the demand needs more workers than there can be",
    ConditionType.routers_ready: "all routers serve requests",
    ConditionType.reports_fresh: "every ready worker sends reports",
    ConditionType.workers_healthy: "no worker differs from its own past and its peers",
    ConditionType.pinned: "a user pinned a shape",
}
"""What each condition means while it is True."""

REASONS: tuple[ConditionReason, ...] = (
    ConditionReason(
        ConditionType.ready,
        "True",
        "AllWorkersAvailable",
        "everything is as the spec wants it",
        "nothing",
    ),
    ConditionReason(
        ConditionType.ready,
        "True",
        "ScaledToZero",
        "`spec.replicas` is 0, or `scaling.minReplicas` is 0 and no request came for `idleAfter`. No worker runs."
        " Ready is True, Available is False",
        "raise `spec.replicas`; with `scaling` nothing: the next request starts a worker",
    ),
    ConditionReason(
        ConditionType.ready,
        "False",
        "Paused",
        "`spec.paused` is true. Progressing is Unknown. Ready is False if the workers are of an earlier spec, or "
        "if nothing was created yet",
        "set it to false",
    ),
    ConditionReason(
        ConditionType.progressing,
        "Unknown",
        "Paused",
        "`spec.paused` is true. Progressing is Unknown. Ready is False if the workers are of an earlier spec, or "
        "if nothing was created yet",
        "set it to false",
    ),
    ConditionReason(
        ConditionType.stalled,
        "True",
        "SpecRefused",
        "the operator cannot carry out the spec; the message names the field. Running workers keep serving",
        "correct the spec; it is read again at once",
    ),
    ConditionReason(
        ConditionType.stalled,
        "True",
        "ChildRefused",
        "the API server refused an object of the deployment, for example because of a quota, Pod Security or an "
        "immutable field. The other objects are applied",
        "correct what the message names. The operator tries again by itself, at growing intervals",
    ),
    ConditionReason(
        ConditionType.stalled,
        "True",
        "ChildNotOwned",
        "an object with the name that the deployment needs belongs to someone else; the message names both",
        "delete or rename one of them. The operator never takes an object over",
    ),
    ConditionReason(
        ConditionType.stalled,
        "True",
        "PodsNotCreated",
        "Kubernetes cannot create the pods: a quota, a LimitRange, Pod Security, a missing service account",
        "correct what the message names",
    ),
    ConditionReason(
        ConditionType.stalled,
        "True",
        "ObjectMissing",
        "a pod needs a Secret, a ConfigMap or a PersistentVolumeClaim that does not exist",
        "create the named object",
    ),
    ConditionReason(
        ConditionType.stalled,
        "True",
        "ImageNotPulled",
        "the image cannot be pulled",
        "check the name of the image and `imagePullSecrets`",
    ),
    ConditionReason(
        ConditionType.stalled,
        "True",
        "VolumeNotMounted",
        "a volume cannot be mounted",
        "check the volume and its node; the message is the kubelet's",
    ),
    ConditionReason(
        ConditionType.stalled,
        "True",
        "ContainerNotCreated",
        "the container runtime cannot start the container",
        "check command, devices and runtime class",
    ),
    ConditionReason(
        ConditionType.stalled,
        "True",
        "DoesNotFit",
        "the model does not fit in the memory, found before it was loaded. Workers that serve keep serving",
        "see MemoryFits below",
    ),
    ConditionReason(
        ConditionType.stalled,
        "True",
        "DraftRefused",
        "the draft does not fit the target, and the worker ended instead of serving without it",
        "see DraftCompatible below",
    ),
    ConditionReason(
        ConditionType.stalled,
        "True",
        "WorkerRefused",
        "a worker ended before it loaded the model; the message is its own",
        "correct what the message names",
    ),
    ConditionReason(
        ConditionType.stalled,
        "True",
        "WorkerFailing",
        "a worker ends again and again. Stalled if the deployment was not Ready for five minutes meanwhile",
        "`kubectl logs deploy/NAME-worker --all-containers --previous`",
    ),
    ConditionReason(
        ConditionType.reconciling,
        "True",
        "WorkerFailing",
        "a worker ends again and again. Stalled if the deployment was not Ready for five minutes meanwhile",
        "`kubectl logs deploy/NAME-worker --all-containers --previous`",
    ),
    ConditionReason(
        ConditionType.stalled,
        "True",
        "RoutersFailing",
        "pods of the routers cannot be created, or are not ready within ten minutes",
        "`kubectl describe deploy/NAME-router`; meanwhile the Service selects the workers",
    ),
    ConditionReason(
        ConditionType.stalled,
        "True",
        "RolloutTimedOut",
        "the rollout did not finish within its deadline; the message has the cause of one pod",
        "look at the pod; the old pods keep serving",
    ),
    ConditionReason(
        ConditionType.reconciling,
        "True",
        "Creating",
        "the Deployment of the workers does not exist yet",
        "wait some seconds",
    ),
    ConditionReason(
        ConditionType.reconciling,
        "True",
        "RollingOut",
        "new pods replace old ones",
        "wait; `kubectl logs -c pull` shows a download",
    ),
    ConditionReason(
        ConditionType.reconciling,
        "True",
        "WorkersStarting",
        "all pods are up to date, and not all of them are available yet",
        "wait; `kubectl logs -c pull` shows a download",
    ),
    ConditionReason(
        ConditionType.reconciling,
        "True",
        "Scaling",
        "the number of workers was changed just now",
        "wait",
    ),
    ConditionReason(
        ConditionType.reconciling,
        "True",
        "RoutersStarting",
        "routers are starting, are being replaced, or their number was changed",
        "wait some seconds",
    ),
    ConditionReason(
        ConditionType.reconciling,
        "True",
        "Unschedulable",
        "no node has room for a pod; the message is the scheduler's",
        "wait for the cluster autoscaler, or make room. After the deadline of the rollout it is Stalled",
    ),
    ConditionReason(
        ConditionType.reconciling,
        "True",
        "ApplyRetrying",
        "the API server or a webhook did not answer for the named object",
        "check the webhook. The operator tries again by itself, at growing intervals",
    ),
    ConditionReason(
        ConditionType.progressing,
        "True",
        "Complete",
        "all workers run the current pod template",
        "nothing",
    ),
    ConditionReason(
        ConditionType.available,
        "True",
        "WorkerAvailable",
        "at least one worker serves requests",
        "nothing",
    ),
    ConditionReason(
        ConditionType.available,
        "False",
        "WorkersStarting",
        "no worker serves requests yet",
        "see Reconciling",
    ),
    ConditionReason(
        ConditionType.available,
        "False",
        "WorkerFailing",
        "no worker serves requests; the message says what one pod waits for",
        "see Stalled or Reconciling",
    ),
    ConditionReason(
        ConditionType.available,
        "False",
        "ScaledToZero",
        "`spec.replicas` is 0, or the deployment is idle and routers hold the next request",
        "raise `spec.replicas`; nothing where `scaling.minReplicas` is 0",
    ),
    ConditionReason(
        ConditionType.available,
        "False",
        "NoWorkers",
        "the first spec was refused, so that no worker was started",
        "correct the spec",
    ),
    ConditionReason(
        ConditionType.memory_fits,
        "True",
        "Fits",
        "the message says how many KV-cache tokens fit",
        "nothing",
    ),
    ConditionReason(
        ConditionType.memory_fits,
        "False",
        "DoesNotFit",
        "the message has the calculation line by line",
        "change what the message names: `engine.maxModelLen`, `engine.maxNumSeqs` or `workers.resources`",
    ),
    ConditionReason(
        ConditionType.memory_fits,
        "Unknown",
        "NotCheckedYet",
        "no worker has reported its memory yet",
        "wait for the first worker",
    ),
    ConditionReason(
        ConditionType.draft_compatible,
        "True",
        "DraftLoaded",
        "the draft fits the target",
        "nothing",
    ),
    ConditionReason(
        ConditionType.draft_compatible,
        "False",
        "DraftRefused",
        "the message names the tensor or the field. The target serves without a draft",
        "use a draft of this target",
    ),
    ConditionReason(
        ConditionType.draft_compatible,
        "Unknown",
        "NotLoadedYet",
        "no worker has reported yet, or the message says why a report was not read",
        "wait; see ReportsFresh",
    ),
    ConditionReason(
        ConditionType.draft_rollout,
        "True",
        "Canary",
        "a worker tries a candidate draft; the message names the pod",
        "nothing; `kubectl specdecode drafts` shows the evidence",
    ),
    ConditionReason(
        ConditionType.draft_rollout,
        "True",
        "Collecting",
        "a training run waits for captured requests; the message has the number that it needs",
        "nothing; `kubectl specdecode drafts` shows how many there are",
    ),
    ConditionReason(
        ConditionType.draft_rollout,
        "True",
        "Distilling",
        "a Job trains a draft; the message has its state in the words of the scheduler, the queue or the kernel",
        "make room if it is Unschedulable; Refused, Failed and OutOfMemory name the cause",
    ),
    ConditionReason(
        ConditionType.draft_rollout,
        "False",
        "RunRefused",
        "the latest command to train could not be carried out, or the operator has no rights on Jobs; the message"
        " says why",
        "repair it, and give the command again; for the rights, upgrade the chart with the image",
    ),
    ConditionReason(
        ConditionType.draft_rollout,
        "True",
        "WaitsForUser",
        "the candidate is better, and `draftRollout.mode` is Manual",
        "`kubectl specdecode promote` or `reject`",
    ),
    ConditionReason(
        ConditionType.draft_rollout,
        "True",
        "Promoting",
        "the workers load the promoted draft",
        "nothing",
    ),
    ConditionReason(
        ConditionType.draft_rollout,
        "True",
        "RollingBack",
        "the workers return to the draft before",
        "nothing; the message of NoRollout then has the reason",
    ),
    ConditionReason(
        ConditionType.draft_rollout,
        "False",
        "PromotedDraftServes",
        "a promoted draft serves in place of the one of the spec; its SpecDecodeDraft has the role Serving",
        "nothing; keep the SpecDecodeDraft in git or in a backup",
    ),
    ConditionReason(
        ConditionType.draft_rollout,
        "False",
        "NoRollout",
        "no rollout is under way; the message has the latest verdict",
        "nothing",
    ),
    ConditionReason(
        ConditionType.draft_rollout,
        "False",
        "CandidateWaits",
        "a SpecDecodeDraft was not taken up yet; the message says why",
        "wait for a worker that reports its draft, or set `speculation.mode`",
    ),
    ConditionReason(
        ConditionType.draft_rollout,
        "False",
        "CandidateRefused",
        "no worker could use the latest candidate; the message says why",
        "repair it, and set its role to Candidate again",
    ),
    ConditionReason(
        ConditionType.draft_fresh,
        "True",
        "Fresh",
        "no task became slower than its baseline; the message has the difference by task",
        "nothing",
    ),
    ConditionReason(
        ConditionType.draft_fresh,
        "True",
        "MixChanged",
        "all tasks together became slower and no task did: requests of slower tasks have a larger share",
        "nothing; a task with a large share may get a draft of its own (`tasks[].draft`)",
    ),
    ConditionReason(
        ConditionType.draft_fresh,
        "False",
        "DraftStale",
        "the named tasks became slower than their baseline by more than `distillation.trigger.minLossPercent`. "
        "The message says whether a training run is worth its device time",
        "offer another draft (`kubectl specdecode try`), or let `distillation.trigger.mode` train one",
    ),
    ConditionReason(
        ConditionType.draft_fresh,
        "Unknown",
        "LearningBaseline",
        "the baseline is not complete; the message says how much time is left and what began it",
        "wait. It begins anew with another draft, target or image",
    ),
    ConditionReason(
        ConditionType.speculation_effective,
        "True",
        "Faster",
        "the message has the speed-up",
        "nothing",
    ),
    ConditionReason(
        ConditionType.speculation_effective,
        "True",
        "DraftingIsDear",
        "speculation is faster, and draft passes take over 30 % of a step by measured step times",
        "try a cheaper draft: a smaller draft vocabulary, or a parallel draft (`peagle`, `dflash`)",
    ),
    ConditionReason(
        ConditionType.speculation_effective,
        "False",
        "NoDraft",
        "no worker can use the draft, so the target serves without one",
        "see DraftCompatible",
    ),
    ConditionReason(
        ConditionType.speculation_effective,
        "False",
        "PlainIsFaster",
        "by measurement decoding without speculation is faster at this load, so it runs",
        "nothing is lost; another draft may change that",
    ),
    ConditionReason(
        ConditionType.speculation_effective,
        "False",
        "SuspendedByGuards",
        "the plan speculates at this load, and the guards of all workers run decoding without speculation: it was"
        " faster in their latest comparison. The message has the shape",
        "nothing is lost; the guards try the shape again from time to time, and the plan changes if it keeps losing",
    ),
    ConditionReason(
        ConditionType.speculation_effective,
        "False",
        "Slower",
        "slower than decoding without speculation at equal load",
        "nothing: the plan or a guard stops it where the spec allows it",
    ),
    ConditionReason(
        ConditionType.speculation_effective,
        "False",
        "NoGain",
        "as fast as decoding without speculation. A guard that runs decoding without speculation gives the same result",
        "`kubectl specdecode explain` shows the guards",
    ),
    ConditionReason(
        ConditionType.speculation_effective,
        "Unknown",
        "Measuring",
        "the estimates of this draft are too few for a first decision; the message says what they lack",
        "send requests; `kubectl specdecode explain` shows the drafts so far",
    ),
    ConditionReason(
        ConditionType.speculation_effective,
        "Unknown",
        "NotMeasured",
        "fewer than 500 tokens in the last minute, or no steps without a draft to compare with",
        "wait, or set `stability: Low`",
    ),
    ConditionReason(
        ConditionType.scaling_limited,
        "False",
        "WithinBounds",
        "the number of workers follows the demand",
        "nothing",
    ),
    ConditionReason(
        ConditionType.scaling_limited,
        "True",
        "AtMaximum",
        "the demand needs more than `scaling.maxReplicas`",
        "raise it",
    ),
    ConditionReason(
        ConditionType.scaling_limited,
        "True",
        "Unschedulable",
        "pods cannot be scheduled; the message is the scheduler's",
        "make room",
    ),
    ConditionReason(
        ConditionType.scaling_limited,
        "True",
        "ObjectiveOutOfReach",
        "a single sequence already misses an objective, so that more workers do not help",
        "a smaller model, another GPU or another objective",
    ),
    ConditionReason(
        ConditionType.routers_ready,
        "True",
        "AllRoutersReady",
        "all routers serve requests",
        "nothing",
    ),
    ConditionReason(
        ConditionType.routers_ready,
        "False",
        "RoutersStarting",
        "some routers are not ready. While none is, the Service selects the workers",
        "wait some seconds",
    ),
    ConditionReason(
        ConditionType.routers_ready,
        "False",
        "RoutersFailing",
        "see Stalled",
        "see Stalled",
    ),
    ConditionReason(
        ConditionType.reports_fresh,
        "True",
        "Reporting",
        "every ready worker sends reports",
        "nothing",
    ),
    ConditionReason(
        ConditionType.reports_fresh,
        "False",
        "ReportsStale",
        "ready workers have sent no report for 30 s and three polls",
        "see below",
    ),
    ConditionReason(
        ConditionType.reports_fresh,
        "Unknown",
        "NoWorkers",
        "no worker is ready",
        "see Available",
    ),
    ConditionReason(
        ConditionType.workers_healthy,
        "True",
        "Healthy",
        "no worker differs from its own past and its peers",
        "nothing",
    ),
    ConditionReason(
        ConditionType.workers_healthy,
        "False",
        "AcceptanceCollapsed",
        "the acceptance of the named pod fell far below its own past, and that of its peers did not. The pod "
        "decodes without a draft until it recovers",
        "check its node; `workers.recycle: OnCollapse` replaces such pods",
    ),
    ConditionReason(
        ConditionType.workers_healthy,
        "False",
        "SlowSteps",
        "the steps of the named pod take longer than those of its peers: another GPU, a hot node or a shared node",
        "check its node",
    ),
    ConditionReason(
        ConditionType.pinned,
        "True",
        "PinnedBySpec",
        "a user pinned a shape, which runs at every load",
        "`kubectl specdecode unpin`",
    ),
    ConditionReason(
        ConditionType.pinned,
        "False",
        "BadPin",
        "a shape cannot run. The previous pin stays in force",
        "write what the message says",
    ),
)
