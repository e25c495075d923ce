"""The worker's report: monotonic counters, so that any two reports can be subtracted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from specdecode_worker.contract.assignment import TrialState
from specdecode_worker.contract.capture import CaptureReport
from specdecode_worker.contract.plan import Buckets
from specdecode_worker.contract.synthetic import SyntheticKnobs
from specdecode_worker.contract.wire import (
    CONTRACT_VERSION,
    MAX_DEPTH,
    MAX_NODES,
    MAX_RANKS,
    DraftQuantization,
    Method,
    Received,
)


class AcceptanceCell(Received):
    """Counts of the rank of the target's token among the draft's candidates, at positions with an accepted parent.

    The counts are monotonic: ``ranks[r]`` for rank r < 8, ``ranks[8]`` for a miss. ``depth`` starts at 1. ``parent`` is
    main if the path to the parent has rank 0 throughout, and sibling otherwise. Shadow drafts, which are never
    verified, count in the same way, because the target's token does not depend on the draft.
    """

    draft: str
    task: str
    sampled: bool
    depth: int = Field(ge=1, le=MAX_DEPTH)
    parent: Literal["main", "sibling"]
    ranks: tuple[int, ...] = Field(min_length=MAX_RANKS + 1, max_length=MAX_RANKS + 1)

    @property
    def total(self) -> int:
        """Number of observations in this cell."""
        return sum(self.ranks)


class ContextCell(Received):
    """First draft tokens of one draft and task in steps of one context bucket: those drafted, and those accepted."""

    draft: str
    task: str
    context: int = Field(ge=0)
    total: int = Field(ge=0)
    hits: int = Field(ge=0)


class RequestCell(Received):
    """Sums over ``n`` finished requests. Tokens of a request are correlated, so errors are estimated per request.

    ``a`` sums the accepted draft tokens of the requests, ``d`` their drafts (steps with a draft). ``aa``, ``ad`` and
    ``dd`` sum the products of these two values of each request.
    """

    draft: str
    task: str
    sampled: bool
    n: int
    a: int
    d: int
    aa: int
    ad: int
    dd: int


FEATURES = ("one", "sequences", "verify_tokens", "kv_tokens", "draft_passes", "prefill_tokens")
"""Feature vector x of a step, in the order of the sums in StepCell. Its length is k there."""


class StepCell(Received):
    """Cost of the steps of one kind: sums for least squares of t (wall seconds) on x (FEATURES).

    ``x``, ``xt``, ``t`` and ``tt`` are sums over ``count`` steps. ``xx`` is the upper triangle of the k x k moment
    matrix, row by row. ``t`` is clipped at four times the running median of its cell; ``clipped`` is the number of
    clipped steps.
    """

    tokens_bucket: int
    """Upper edge of the bucket of packed tokens, a power of two."""
    draft_passes: int
    """Draft passes of a step: the depth of its deepest tree, or 1 if the draft's method is in ``ONE_PASS``."""
    prefill: bool
    context_bucket: int
    count: int
    x: tuple[float, ...]
    xx: tuple[float, ...]
    xt: tuple[float, ...]
    t: float
    tt: float
    device_seconds: float
    wall_seconds: float
    clipped: int
    emitted: int
    """Tokens that these steps emitted. wall_seconds * sequences / emitted is the time per token."""


class TrafficCell(Received):
    """Requests and tokens received and completed, by task."""

    task: str
    arrivals: int
    finished: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class LatencyHistogram(Received):
    """Latency histogram with its sum.

    ``edges`` are inclusive upper edges in seconds; ``counts`` has one more entry, for +Inf.
    """

    name: Literal["ttft", "ttit", "e2e", "queue"]
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @model_validator(mode="after")
    def _one_count_more_than_edges(self) -> Self:
        if len(self.counts) != len(self.edges) + 1:
            raise ValueError(f"{self.name}: {len(self.edges)} edges need {len(self.edges) + 1} counts")
        return self


class HistogramCounts(Received):
    """Counts and sum of a latency histogram. Its edges are those of the ``LatencyHistogram`` of the same latency."""

    counts: tuple[int, ...] = ()
    sum: float = 0


class TaskCell(Received):
    """Latencies, decoding steps and drafts of one task. Tokens per step = decode_tokens / decode_steps."""

    task: str
    ttft: HistogramCounts = HistogramCounts()
    itl: HistogramCounts = HistogramCounts()
    """Inter-token latency, i.e. the share of this task in the histogram ``ttit``."""
    decode_steps: int = 0
    """Sequence-steps after the prompt, with and without a draft."""
    decode_tokens: int = 0
    """Tokens that these steps emitted."""
    drafts: int = 0
    """Those of the steps that verified a draft."""
    draft_tokens: int = 0
    accepted_tokens: int = 0


class GuardCell(Received):
    """State of the guard at one load: seconds per token with and without speculation, and its decision."""

    concurrency: int
    context: int
    speculative: float | None
    plain: float | None
    suppressed: bool
    """True if speculation was stopped and plain steps after the stop confirmed that it was slower."""


class PlanState(Received):
    """Plan that a worker runs. If ``matches_draft`` is false, ``initial`` is used instead of the rows."""

    uid: str = ""
    version: int = 0
    draft: str = ""
    matches_draft: bool = True
    quiet: bool = False
    """Copy of ``Plan.quiet``. A plan version has separate content for quiet workers."""
    buckets: Buckets = Buckets()


class PendingDraft(Received):
    """Draft that a worker loads to replace the running one, which stays in use until then."""

    method: Method
    hash: str = ""
    """Hash that the report shows once this draft runs."""
    uri: str = ""
    quantization: DraftQuantization | None = None
    since_seconds: float = 0
    """Time of the request on the worker's monotonic clock, which is that of ``Report.clock_seconds``."""


class DraftState(Received):
    """Draft that a worker has loaded, or the reason why it has none. ``name`` is empty for the first draft."""

    name: str = ""
    method: Method = "none"
    hash: str = ""
    uri: str = ""
    quantization: DraftQuantization | None = None
    agreement: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(max_length=MAX_NODES)] = ()
    """Acceptance rates by depth that the draft's evaluation recorded in calibration.json; empty if there are none."""
    problem: str | None = None
    """Reason why the draft was not loaded at start, naming the file or tensor, or why its process is gone now.

    The worker serves without it.
    """
    pending: PendingDraft | None = None
    """Draft that is being loaded to replace this one."""
    swap_problem: str | None = None
    """Reason why the last replacement failed; this draft stayed in use. None after a success or a new request."""


class PhaseSeconds(Received):
    """Cumulative time of the phases of a step, in seconds of the engine loop."""

    draft: float = 0
    verify: float = 0
    sample: float = 0
    """Time to choose tokens and to walk the trees."""
    bookkeeping: float = 0


class StartSeconds(Received):
    """Time of the stages of a worker's start, in seconds of its engine process."""

    pull: float = 0
    """Download of models that `pull` did not fetch before."""
    read: float = 0
    """From files to memory."""
    place: float = 0
    """Conversion and copy to the device."""
    fuse: float = 0
    """Quantization, fusion and packing of weights."""
    compile: float = 0
    """Kernels, and the first steps."""
    capture: float = 0
    """CUDA graphs."""
    calibrate: float = 0
    """Measured step times."""


class MemoryState(Received):
    """Use of the device's memory, in bytes. ``limit`` is that of the device or the container."""

    limit: int = 0
    weights: int = 0
    drafts: int = 0
    kv_cache: int = 0
    reserve: int = 0


class Report(Received):
    """State of a worker as the operator polls it. Counters are monotonic within one ``boot_id``."""

    contract_version: int = CONTRACT_VERSION
    boot_id: str
    worker: str
    clock_seconds: float
    """The worker's monotonic clock: the time base for differences of counters."""
    model: str = ""
    target: str = ""
    """`model_hash` of the target: config and weights."""
    compatibility_key: str = ""
    """Digest of everything that text depends on besides the request; see ``contract.internal_stream``.

    A router continues a request only on a worker with an equal key. Empty for versions without internal streams.
    """
    draft: DraftState = DraftState()
    named_drafts: tuple[DraftState, ...] = ()
    """Additional drafts. Rows of the plan are computed for ``draft``, but apply to the draft of each task."""
    trial: TrialState | None = None
    """Trial of a candidate that this worker runs, or that failed here. None: the plan assigns it none."""
    capture: CaptureReport | None = None
    """Captured requests; None where the worker has no folder for captures."""
    plan: PlanState = PlanState()
    synthetic: SyntheticKnobs | None = None
    draining: bool = False
    max_num_seqs: int = 1
    running: int = 0
    waiting: int = 0
    running_request_seconds: float = 0
    waiting_request_seconds: float = 0
    kv_tokens_total: int = 0
    kv_tokens_used: int = 0
    """Tokens of KV cache that running requests own."""
    kv_tokens_cached: int = 0
    """Tokens of KV cache that are kept for prefix reuse and can be reclaimed."""
    preemptions: int = 0
    prefill_chunks: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    """Prompt tokens found in the prefix cache, out of the ``prefix_query_tokens`` looked up."""
    remote_prefills: int = 0
    """Requests for whose blocks this worker asked another one, and for how many not all of them came."""
    remote_prefill_failures: int = 0
    remote_prefill_tokens: int = 0
    remote_prefill_bytes: int = 0
    phases: PhaseSeconds | None = None
    memory: MemoryState | None = None
    start: StartSeconds | None = None
    drafts: int = 0
    """Sequence-steps of all tasks that verified a draft. Tokens per step = 1 + accepted_tokens / drafts."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    plain_steps: int = 0
    """Sequence-steps that decoded without a draft."""
    acceptance: tuple[AcceptanceCell, ...] = ()
    """Acceptance by the draft of the task. Ranks of merged drafts are ranks in their common order."""
    credit: tuple[AcceptanceCell, ...] = ()
    """Acceptance of each draft on its own, in the trees of tasks that merge drafts.

    A node that several drafts propose counts for each of them. Ranks are those of the draft's own order.
    """
    contexts: tuple[ContextCell, ...] = ()
    """Acceptance of the first draft token by context. As steps, rows are of the longest context in their batch."""
    requests: tuple[RequestCell, ...] = ()
    steps: tuple[StepCell, ...] = ()
    traffic: tuple[TrafficCell, ...] = ()
    latency: tuple[LatencyHistogram, ...] = ()
    tasks: tuple[TaskCell, ...] = ()
    """Latencies by task. Their sums over tasks are the histograms of ``latency``."""
    guard: tuple[GuardCell, ...] = ()


def suppressed_loads(reports: Iterable[Report], version: int) -> set[tuple[int, int]]:
    """Return the loads (concurrency, context) where every guard with a verdict on this plan suppresses speculation."""
    verdicts: dict[tuple[int, int], bool] = {}
    for cell in (cell for report in reports if report.plan.version == version for cell in report.guard):
        load = (cell.concurrency, cell.context)
        verdicts[load] = verdicts.get(load, True) and cell.suppressed
    return {load for load, suppressed in verdicts.items() if suppressed}
