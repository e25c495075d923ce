"""What a worker tells: monotonic counters, so that any two readings can be subtracted."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from specdecode_worker.contract.plan import Buckets
from specdecode_worker.contract.synthetic import SyntheticKnobs
from specdecode_worker.contract.wire import CONTRACT_VERSION, MAX_RANKS, Method, Received


class AcceptanceCell(Received):
    """Where the target's token stood in the draft's ordering, wherever the parent was accepted.

    Monotonic counts: ``ranks[r]`` for rank r < 8, ``ranks[8]`` for a miss. ``depth`` starts at 1. ``parent`` says
    whether the path to the parent was rank 0 all along (main) or passed a sibling. What was drafted in the shadow
    (never verified) counts just the same: the target's token does not depend on the draft.
    """

    draft: str
    task: str
    sampled: bool
    depth: int = Field(ge=1, le=16)
    parent: Literal["main", "sibling"]
    ranks: tuple[int, ...] = Field(min_length=MAX_RANKS + 1, max_length=MAX_RANKS + 1)

    @property
    def total(self) -> int:
        return sum(self.ranks)


class RequestCell(Received):
    """Sums over finished requests; a request's tokens are correlated, so errors go by request.

    ``a`` is accepted draft tokens, ``d`` drafts (steps with a draft) of one request.
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
"""The vector x of a step, in the order in which StepCell sums it; its length is k below."""


class StepCell(Received):
    """Cost of the steps of one kind: sums for least squares on x (FEATURES) and t (wall seconds).

    ``xx`` is the upper triangle of the k x k moment matrix, row by row. ``t`` is clipped at four times the running
    median of its cell; ``clipped`` counts how often.
    """

    tokens_bucket: int
    """Upper edge of the bucket of packed tokens, a power of two."""
    draft_passes: int
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
    """Tokens that these steps emitted; wall_seconds * sequences / emitted is the time per token."""


class TrafficCell(Received):
    """What came in and went out, by task."""

    task: str
    arrivals: int
    finished: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class LatencyHistogram(Received):
    """Counts per bucket (``edges`` are upper, inclusive, seconds; one more count for +Inf) and their sum."""

    name: Literal["ttft", "ttit", "e2e", "queue"]
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @model_validator(mode="after")
    def _one_count_more_than_edges(self) -> Self:
        if len(self.counts) != len(self.edges) + 1:
            raise ValueError(f"{self.name}: {len(self.edges)} edges need {len(self.edges) + 1} counts")
        return self


class GuardCell(Received):
    """A load at which the guard watches speculation: seconds per token with it and without, and its verdict."""

    concurrency: int
    context: int
    speculative: float | None
    plain: float | None
    suppressed: bool
    """Speculation was stopped, and plain steps behind the stop have borne it out."""


class PlanState(Received):
    """The plan a worker runs. ``matches_draft`` False means that ``initial`` runs instead of the rows."""

    uid: str = ""
    version: int = 0
    draft: str = ""
    matches_draft: bool = True
    quiet: bool = False
    """As in the plan: a version has two of them."""
    buckets: Buckets = Buckets()


class DraftState(Received):
    """A draft that a worker has loaded, or why it has none. ``name`` is empty for the first."""

    name: str = ""
    method: Method = "none"
    hash: str = ""
    uri: str = ""
    problem: str | None = None
    """What does not fit, naming the tensor or the field; the endpoint serves plainly meanwhile."""


class PhaseSeconds(Received):
    """Where the time of steps went, in monotonic seconds of the engine loop."""

    draft: float = 0
    verify: float = 0
    sample: float = 0
    """Choosing tokens and walking the trees."""
    bookkeeping: float = 0


class MemoryState(Received):
    """What the device's memory holds, in bytes. ``limit`` is the device's or the container's."""

    limit: int = 0
    weights: int = 0
    drafts: int = 0
    kv_cache: int = 0
    reserve: int = 0


class Report(Received):
    """All that the operator learns of a worker. Counters are monotonic within one ``boot_id``."""

    contract_version: int = CONTRACT_VERSION
    boot_id: str
    worker: str
    clock_seconds: float
    """The worker's monotonic clock; differences of it are the time base of differences of counters."""
    model: str = ""
    target: str = ""
    """Hash of the target's weights."""
    draft: DraftState = DraftState()
    named_drafts: tuple[DraftState, ...] = ()
    """The further ones; rows of the plan are for ``draft``, and run with whatever draft a task uses."""
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
    """Owned by running requests."""
    kv_tokens_cached: int = 0
    """Kept for prefix reuse, free for whoever needs them."""
    preemptions: int = 0
    prefill_chunks: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    """Prompt tokens looked up among the cached blocks, and those that were found there."""
    phases: PhaseSeconds | None = None
    memory: MemoryState | None = None
    drafts: int = 0
    """Sequence-steps that verified a draft; tokens per step = 1 + accepted_tokens / drafts."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    plain_steps: int = 0
    """Sequence-steps that decoded without a draft."""
    acceptance: tuple[AcceptanceCell, ...] = ()
    requests: tuple[RequestCell, ...] = ()
    steps: tuple[StepCell, ...] = ()
    traffic: tuple[TrafficCell, ...] = ()
    latency: tuple[LatencyHistogram, ...] = ()
    guard: tuple[GuardCell, ...] = ()
