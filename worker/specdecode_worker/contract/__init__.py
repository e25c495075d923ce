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
from specdecode_worker.contract.capture import CaptureConfig, CaptureReport, CaptureRules
from specdecode_worker.contract.config import (
    DRAFT_FREE,
    GPU_DEFAULTS,
    ONE_PASS,
    PLACEABLE,
    WITH_MLP,
    DraftConfig,
    EngineConfig,
    ModelConfig,
    NamedDraft,
    ServerConfig,
    WorkerConfig,
    adapted_uri,
    default_served_name,
    draft_passes,
)
from specdecode_worker.contract.distillation import MAX_VERDICT_BYTES, CheckVerdict
from specdecode_worker.contract.names import Env, Header, Metric, Port, Route
from specdecode_worker.contract.plan import Buckets, MergedDraft, Plan, PlanRow, TaskMatch, belongs
from specdecode_worker.contract.report import (
    FEATURES,
    AcceptanceCell,
    ContextCell,
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
    StartSeconds,
    StepCell,
    TaskCell,
    TrafficCell,
    suppressed_loads,
)
from specdecode_worker.contract.revisions import Revisions
from specdecode_worker.contract.shape import TreeShape
from specdecode_worker.contract.synthetic import StepTime, SyntheticKnobs
from specdecode_worker.contract.wire import (
    CONTRACT_VERSION,
    MAX_CLIENTS,
    MAX_DEPTH,
    MAX_MERGED,
    MAX_NODES,
    MAX_RANKS,
    MAX_REPORT_BYTES,
    MAX_TASKS,
    OTHER_TASK,
    SUPPORTED_CONTRACT_VERSIONS,
    DraftMethod,
    DraftQuantization,
    Dtype,
    KVCacheDtype,
    Method,
    Mode,
    Placement,
    ReasoningFormat,
    Received,
    Sampler,
    TargetQuantization,
    TaskName,
    ToolFormat,
    Written,
)
