"""Interface between operator and worker: config, plan, report, routes and metric names.

The worker owns this package; the operator may import nothing else of the worker. The config is passed once, in the
pod's environment. The plan is pushed to the worker and mounted into its pod. The report is polled. Readers ignore
unknown fields, so that either side may be one version newer; the operator also reads reports of the two versions before
its own (see ``wire.SUPPORTED_CONTRACT_VERSIONS``). Unknown fields of documents that a person may have written
are refused (see ``wire.Written``).
"""

from specdecode_worker.contract.assignment import (
    Artifact,
    DraftAssignment,
    DraftTrial,
    TrialCost,
    TrialPair,
    TrialState,
    candidate_first,
)
from specdecode_worker.contract.capture import CaptureConfig
from specdecode_worker.contract.config import (
    DRAFT_FREE,
    GPU_DEFAULTS,
    WITH_MLP,
    DraftConfig,
    EngineConfig,
    ModelConfig,
    NamedDraft,
    ServerConfig,
    WorkerConfig,
)
from specdecode_worker.contract.names import Env, Header, Metric, Port, Route
from specdecode_worker.contract.plan import Buckets, Plan, PlanRow, TaskMatch
from specdecode_worker.contract.report import (
    FEATURES,
    AcceptanceCell,
    DraftState,
    GuardCell,
    HistogramCounts,
    LatencyHistogram,
    MemoryState,
    PendingDraft,
    PhaseSeconds,
    PlanState,
    Report,
    RequestCell,
    StepCell,
    TaskCell,
    TrafficCell,
)
from specdecode_worker.contract.revisions import Revisions
from specdecode_worker.contract.shape import TreeShape
from specdecode_worker.contract.synthetic import StepTime, SyntheticKnobs
from specdecode_worker.contract.verdict import MAX_VERDICT_BYTES, CheckVerdict
from specdecode_worker.contract.wire import (
    CONTRACT_VERSION,
    MAX_NODES,
    MAX_RANKS,
    MAX_REPORT_BYTES,
    MAX_TASKS,
    OTHER_TASK,
    SUPPORTED_CONTRACT_VERSIONS,
    DraftQuantization,
    Dtype,
    Method,
    Mode,
    Received,
    Sampler,
    TargetQuantization,
    TaskName,
    ToolFormat,
    Written,
)

__all__ = [
    "CONTRACT_VERSION",
    "DRAFT_FREE",
    "FEATURES",
    "GPU_DEFAULTS",
    "MAX_NODES",
    "MAX_RANKS",
    "MAX_REPORT_BYTES",
    "MAX_TASKS",
    "MAX_VERDICT_BYTES",
    "OTHER_TASK",
    "SUPPORTED_CONTRACT_VERSIONS",
    "WITH_MLP",
    "AcceptanceCell",
    "Artifact",
    "Buckets",
    "CaptureConfig",
    "CheckVerdict",
    "DraftAssignment",
    "DraftConfig",
    "DraftQuantization",
    "DraftState",
    "DraftTrial",
    "Dtype",
    "EngineConfig",
    "Env",
    "GuardCell",
    "Header",
    "HistogramCounts",
    "LatencyHistogram",
    "MemoryState",
    "Method",
    "Metric",
    "Mode",
    "ModelConfig",
    "NamedDraft",
    "PendingDraft",
    "PhaseSeconds",
    "Plan",
    "PlanRow",
    "PlanState",
    "Port",
    "Received",
    "Report",
    "RequestCell",
    "Revisions",
    "Route",
    "Sampler",
    "ServerConfig",
    "StepCell",
    "StepTime",
    "SyntheticKnobs",
    "TargetQuantization",
    "TaskCell",
    "TaskMatch",
    "TaskName",
    "ToolFormat",
    "TrafficCell",
    "TreeShape",
    "TrialCost",
    "TrialPair",
    "TrialState",
    "WorkerConfig",
    "Written",
    "candidate_first",
]
