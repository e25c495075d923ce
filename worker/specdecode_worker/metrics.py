"""Prometheus metrics of the worker, derived from the engine's report so that both agree."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from specdecode_worker.capture import CaptureCounts, Dropped
from specdecode_worker.contract import OTHER_TASK, LatencyHistogram, Metric, Report
from specdecode_worker.core.kv_cache import BLOCK_SIZE
from specdecode_worker.core.messages import Tokens

# Metric families of one response of /metrics. Every sample has the label ``model_name``.

Samples = Mapping[Any, float] | Iterable[tuple[tuple[str, ...], float]]
"""Sample values by the values of the further labels."""
Histograms = Iterable[tuple[tuple[str, ...], Sequence[int], float]]
"""Triples of values of the further labels, observations per bucket (not accumulated) and sum of the observations."""


class FamilyList(Collector):
    """Metric families of one model, in the order in which they are added."""

    def __init__(self, model: str) -> None:
        self.families: list[Family] = []
        self._model = model

    def collect(self) -> Iterable[Family]:
        """Return the families."""
        return self.families

    def counter(self, name: Metric, text: str, samples: float | Samples, *labels: str) -> None:
        """Add a counter: its value, or its samples by the further ``labels``."""
        self._add(CounterMetricFamily(name, text, labels=("model_name", *labels)), samples)

    def gauge(self, name: Metric, text: str, samples: float | Samples, *labels: str) -> None:
        """Add a gauge: its value, or its samples by the further ``labels``."""
        self._add(GaugeMetricFamily(name, text, labels=("model_name", *labels)), samples)

    def histogram(self, name: Metric, text: str, edges: Sequence[float], histograms: Histograms, *labels: str) -> None:
        """Add a histogram with the further ``labels``.

        ``edges`` are the inclusive upper bounds of the buckets; the last bucket has no upper bound.
        """
        family = HistogramMetricFamily(name, text, labels=("model_name", *labels))
        bounds = [*(str(edge) for edge in edges), "+Inf"]
        for values, counts, total in histograms:
            buckets = list(zip(bounds, map(float, accumulate(counts)), strict=True))
            family.add_metric((self._model, *values), buckets, total)
        self.families.append(family)

    def summary(self, name: Metric, text: str, count: int, total: float) -> None:
        """Add a summary without quantiles."""
        family = SummaryMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), count, total)
        self.families.append(family)

    def _add(self, family: CounterMetricFamily | GaugeMetricFamily, samples: float | Samples) -> None:
        if isinstance(samples, int | float):
            samples = {(): samples}
        for values, value in samples.items() if isinstance(samples, Mapping) else samples:
            family.add_metric((self._model, *values), float(value))
        self.families.append(family)


# Counters of the server: accepted tokens by position, sizes and times of requests, and requests by API key.

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_MILLISECONDS = (0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 25, 30, 40, 50, 75, 100, 200, 500, 1000)
LATENCY_EDGES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 300.0)
"""Upper bounds of the latency buckets by API key, in seconds. They are coarse, because they exist for every key."""
MAX_API_KEYS = 32
"""Most names of API keys that are exported. It bounds the number of time series; all further keys count as other."""
OTHER_API_KEY = "other"
FINISHED_REASONS = ("stop", "length", "abort", "error")
"""vLLM's reasons. A request that the client or a deadline cancelled has ``abort``."""


class LatencyCounts:
    """Observation counts per bucket. ``edges`` are inclusive upper bounds; one further bucket has no bound."""

    __slots__ = ("counts", "edges", "sum")

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Add one observation."""
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value


class KeyCounts:
    """Request counts of one API key."""

    __slots__ = ("e2e", "finished", "generation_tokens", "prompt_tokens", "requests", "ttft")

    def __init__(self) -> None:
        self.requests = self.finished = self.prompt_tokens = self.generation_tokens = 0
        self.ttft, self.e2e = LatencyCounts(LATENCY_EDGES), LatencyCounts(LATENCY_EDGES)


class ServerCounters:
    """Monotonic counters of the server.

    Args:
        clock: Monotonic clock, in seconds.
        capture: Counters of the recorder, if traffic is captured.
        api_keys: Count requests by the name of their API key.
    """

    def __init__(
        self, clock: Callable[[], float], capture: CaptureCounts | None = None, *, api_keys: bool = False
    ) -> None:
        self.clock = clock
        self.timeouts = {"deadline": 0, "queue": 0}
        """Requests that the engine cancelled: at their deadline, or after the longest time in the queue."""
        self.finished: Counter[tuple[str, str]] = Counter()
        """Requests that ended here, by task and by one of FINISHED_REASONS."""
        self.by_key: dict[str, KeyCounts] = {}
        self._api_keys = api_keys
        self.capture = capture or CaptureCounts()
        self.accepted_by_task: defaultdict[str, Counter[int]] = defaultdict(Counter)
        """Accepted draft tokens by position in the draft, from 0, of each task that sent a request."""
        self.prompt_tokens = LatencyCounts(_TOKENS)
        self.generation_tokens = LatencyCounts(_TOKENS)
        self.seconds_per_token = LatencyCounts(tuple(edge / 1000 for edge in _MILLISECONDS))

    def key_counts(self, client: str) -> KeyCounts:
        """Return the counts of an API key. They are not exported for requests without a key."""
        if not self._api_keys or not client:
            return KeyCounts()
        named = len(self.by_key) - (OTHER_API_KEY in self.by_key)
        name = client if client in self.by_key or named < MAX_API_KEYS else OTHER_API_KEY
        return self.by_key.setdefault(name, KeyCounts())


class RequestCounter:
    """Observer that counts one request. It receives every message in order; messages have cumulative counts."""

    __slots__ = ("_accepted", "_began", "_by_position", "_continued", "_counts", "_earlier_tokens", "_failed", "_first",
                 "_key", "_last", "_prompt_tokens", "_task", "_tokens")  # fmt: skip

    def __init__(
        self,
        counts: ServerCounters,
        task: str,
        prompt_tokens: int,
        client: str = "",
        earlier_tokens: int | None = None,
    ) -> None:
        """Count the arrival of a request.

        Args:
            counts: Counters of the server.
            task: Task of the request.
            prompt_tokens: Number of its prompt tokens.
            client: Name of its API key.
            earlier_tokens: Output tokens of an earlier attempt on another worker, which counted the arrival of the
                request; None for a new request.
        """
        self._counts = counts
        self._key = key = counts.key_counts(client)
        self._began = counts.clock()
        self._continued, self._earlier_tokens = earlier_tokens is not None, earlier_tokens or 0
        if not self._continued:
            key.requests += 1
            key.prompt_tokens += prompt_tokens
        self._task, self._by_position = task, counts.accepted_by_task[task]
        self._prompt_tokens = prompt_tokens
        self._accepted = 0
        self._tokens = 0
        self._first = self._last = 0.0
        self._failed = False

    def process(self, tokens: Tokens) -> None:
        """Count the increase since the previous message."""
        if tokens.accepted > self._accepted:  # the message that ends a cancelled request has no totals
            self._by_position.update(range(tokens.accepted - self._accepted))
            self._accepted = tokens.accepted
        if tokens.tokens:
            self._last = self._counts.clock()
            if not self._tokens:
                self._first = self._last
                if not self._continued:
                    self._key.ttft.add(self._first - self._began)
            self._tokens += len(tokens.tokens)
        self._failed = self._failed or tokens.finish == "error"
        if tokens.finish == "deadline":
            self._counts.timeouts["deadline"] += 1
        elif tokens.finish == "queue_timeout":
            self._counts.timeouts["queue"] += 1

    def end(self, finish_reason: str | None, *, moved: bool = False) -> None:
        """Count the ended request. Requests without output are not in the histograms.

        Args:
            finish_reason: ``stop`` or ``length``; None if the request was cancelled or failed.
            moved: Another worker continues the request, and counts its end and its size.
        """
        self._key.generation_tokens += self._tokens
        if moved:
            return
        self._counts.finished[self._task, finish_reason or ("error" if self._failed else "abort")] += 1
        if finish_reason is not None:
            self._key.finished += 1
            if not self._continued:
                self._key.e2e.add(self._last - self._began)
        if self._tokens:
            self._count_sizes()

    def _count_sizes(self) -> None:
        self._counts.prompt_tokens.add(self._prompt_tokens)
        self._counts.generation_tokens.add(self._earlier_tokens + self._tokens)
        if self._tokens > 1:
            self._counts.seconds_per_token.add((self._last - self._first) / (self._tokens - 1))


# Latency metrics of requests, tokens, engine steps and step phases.

_BY_TASK = {
    "ttft": (Metric.time_to_first_token_seconds, "Time from arrival to the first token."),
    "ttit": (Metric.inter_token_latency_seconds, "Time between consecutive tokens."),
}
_TOGETHER = {
    "e2e": (Metric.e2e_request_latency_seconds, "Time from arrival to the last token."),
    "queue": (Metric.request_queue_time_seconds, "Time from arrival to the first step."),
}


def add_latency(add: FamilyList, report: Report, counts: ServerCounters) -> None:
    """Add the latency and size histograms of requests, and the time of engine steps."""
    for cell in report.latency:
        if cell.name in _BY_TASK:
            add.histogram(*_BY_TASK[cell.name], cell.edges, _latency_by_task(report, cell), "task")
        else:
            add.histogram(*_TOGETHER[cell.name], cell.edges, [((), cell.counts, cell.sum)])
    text = "Mean time per output token of a request after its first token, as the client sees it."
    for name, what, sizes in (
        (Metric.request_prompt_tokens, "Prompt tokens per request.", counts.prompt_tokens),
        (Metric.request_generation_tokens, "Generated tokens per request.", counts.generation_tokens),
        (Metric.request_time_per_output_token_seconds, text, counts.seconds_per_token),
    ):
        add.histogram(name, what, sizes.edges, [((), sizes.counts, sizes.sum)])
    text = "Requests that were cancelled at their deadline, or after the longest time in the queue."
    add.counter(Metric.request_timeouts, text, {(reason,): n for reason, n in counts.timeouts.items()}, "reason")
    seconds = sum(cell.wall_seconds for cell in report.steps)
    add.summary(Metric.iteration_seconds, "Wall time of engine steps.", sum(c.count for c in report.steps), seconds)
    if report.phases is not None:
        phases = {(phase,): value for phase, value in report.phases.model_dump().items()}
        add.counter(Metric.step_phase_seconds, "Time of engine steps, by phase.", phases, "phase")


def _latency_by_task(report: Report, cell: LatencyHistogram) -> Histograms:
    """Yield the histogram of each task. Without counts by task, everything belongs to ``other``."""
    if not report.tasks:
        yield (OTHER_TASK,), cell.counts, cell.sum
    for task in report.tasks:
        counted = task.ttft if cell.name == "ttft" else task.itl
        yield (task.task,), counted.counts, counted.sum


# Metrics of traffic, queue, KV cache and device memory.


def add_traffic(add: FamilyList, report: Report, counts: ServerCounters) -> None:
    """Add the metrics of traffic, scheduling, engine state and device memory."""
    none = {(OTHER_TASK,): 0.0}
    prompts = none | {(cell.task,): cell.prompt_tokens for cell in report.traffic}
    add.counter(Metric.prompt_tokens, "Prompt tokens of all requests.", prompts, "task")
    outputs = none | {(cell.task,): cell.output_tokens for cell in report.traffic}
    add.counter(Metric.generation_tokens, "Generated tokens.", outputs, "task")
    ends = {
        (task, reason): counts.finished[task, reason]
        for task in (OTHER_TASK, *counts.accepted_by_task)
        for reason in FINISHED_REASONS
    }
    add.counter(Metric.request_success, "Requests that ended.", ends, "task", "finished_reason")
    text = "Preemptions: requests that freed their KV blocks to restart."
    add.counter(Metric.num_preemptions, text, report.preemptions)
    add.counter(Metric.prefill_chunks, "Prefill chunks that the model processed.", report.prefill_chunks)
    text = "Prompt tokens looked up in the prefix cache."
    add.counter(Metric.prefix_cache_queries, text, report.prefix_query_tokens)
    add.counter(Metric.prefix_cache_hits, "Prompt tokens found in the prefix cache.", report.prefix_hit_tokens)
    add.counter(Metric.remote_prefills, "Requests that asked for blocks of other workers.", report.remote_prefills)
    text = "Those of them that did not get all blocks, and computed the rest."
    add.counter(Metric.remote_prefill_failures, text, report.remote_prefill_failures)
    add.counter(Metric.remote_prefill_tokens, "Prompt tokens of such blocks.", report.remote_prefill_tokens)
    add.counter(Metric.remote_prefill_bytes, "Bytes of such blocks.", report.remote_prefill_bytes)
    total = report.kv_tokens_total or 1
    add.gauge(Metric.num_requests_running, "Requests that are running.", report.running)
    add.gauge(Metric.num_requests_waiting, "Requests that are waiting to run.", report.waiting)
    text = "Fraction of the KV cache in use, from 0 to 1."
    add.gauge(Metric.kv_cache_usage_perc, text, report.kv_tokens_used / total)
    text = "Fraction of the KV cache with reusable prefixes."
    add.gauge(Metric.kv_cache_reusable_perc, text, report.kv_tokens_cached / total)
    add.gauge(Metric.plan_version, "Version of the current speculation plan.", report.plan.version)
    text = "1 while synthetic knobs distort the measurements, else 0."
    add.gauge(Metric.synthetic, text, report.synthetic is not None)
    if report.memory is not None:
        text = "Device memory in bytes, by use; the kind limit is the total available to the worker."
        kinds = {(kind,): value for kind, value in report.memory.model_dump().items()}
        add.gauge(Metric.memory_bytes, text, kinds, "kind")


# Speculation metrics: drafted and accepted tokens, target ranks, loaded drafts and the state of the guard.


def add_speculation(add: FamilyList, report: Report, counts: ServerCounters) -> None:
    """Add the metrics of speculation, by task, depth, draft and bucket of the guard."""
    _add_by_task(add, report, counts)
    text = "Ranks of the target's token among the draft's candidates, counted where the parent token was accepted."
    add.counter(Metric.num_ranked, text, _rank_counts(report), "task", "depth", "rank")
    add.counter(Metric.num_plain_steps, "Steps of a sequence without a draft.", report.plain_steps)
    text = "Steps of a sequence after its prompt, with or without a draft."
    add.counter(Metric.num_decode_steps, text, {(cell.task,): cell.decode_steps for cell in report.tasks}, "task")
    text = "Tokens that decode steps emitted. Divided by the number of decode steps: tokens per step."
    add.counter(Metric.num_decode_tokens, text, {(cell.task,): cell.decode_tokens for cell in report.tasks}, "task")
    text = "1 for each configured draft; problem is the reason why it is not loaded, else empty."
    drafts = [
        ((draft.name, draft.method, draft.hash, draft.uri, draft.problem or ""), 1.0)
        for draft in (report.draft, *report.named_drafts)
    ]
    add.gauge(Metric.draft_info, text, drafts, "draft", "method", "hash", "uri", "problem")
    _add_guard(add, report)


def _add_by_task(add: FamilyList, report: Report, counts: ServerCounters) -> None:
    """Add the draft counters per task."""
    for name, text, attribute in (
        (Metric.num_drafts, "Steps of a sequence that verified a draft.", "drafts"),
        (Metric.num_draft_tokens, "Draft tokens that were verified.", "draft_tokens"),
        (Metric.num_accepted_tokens, "Draft tokens that were accepted.", "accepted_tokens"),
    ):
        add.counter(name, text, {(OTHER_TASK,): 0} | {(c.task,): getattr(c, attribute) for c in report.tasks}, "task")
    positions = {
        (task, str(position)): value
        for task, by_position in counts.accepted_by_task.items()
        for position, value in sorted(by_position.items())
    }
    text = "Draft tokens that were accepted, by position in the draft."
    add.counter(Metric.num_accepted_tokens_per_pos, text, positions, "task", "position")


def _rank_counts(report: Report) -> Counter[tuple[str, ...]]:
    """Return the counts of target ranks, summed over the cells that the report separates.

    The sum is over drafts, greedy and sampled requests, and both kinds of parents.
    """
    rank_counts: Counter[tuple[str, ...]] = Counter()
    for cell in report.acceptance:
        for rank, count in enumerate(cell.ranks):
            rank_counts[cell.task, str(cell.depth), "miss" if rank == len(cell.ranks) - 1 else str(rank)] += count
    return rank_counts


def _add_guard(add: FamilyList, report: Report) -> None:
    """Add the metrics of the guard, by bucket.

    Tasks may run several shapes in one bucket: it is suppressed if all are, and its time is that of the fastest.
    """
    suppressed: dict[tuple[str, str], bool] = {}
    seconds: dict[tuple[str, ...], float] = {}
    for cell in report.guard:
        load = (str(cell.concurrency), str(cell.context))
        suppressed[load] = suppressed.get(load, True) and cell.suppressed
        for how, value in (("speculative", cell.speculative), ("plain", cell.plain)):
            if value is not None:
                seconds[*load, how] = min(value, seconds.get((*load, how), value))
    text = "Plan buckets in which the guard suppresses speculation."
    add.gauge(Metric.guard_suppressed, text, sum(suppressed.values()))
    text = "1 if the guard suppresses speculation in this plan bucket, else 0."
    add.gauge(Metric.guard_state, text, suppressed, "concurrency", "context")
    text = "Seconds per token with and without speculation, as the guard compares them."
    add.gauge(Metric.guard_time_per_token_seconds, text, seconds, "concurrency", "context", "mode")


# Metrics of traffic capture, which are 0 if it is off, so that an alert rule on dropped records needs no special case;
# and of requests by the name of their API key, without samples unless ``api_key_metrics`` is on.


def add_capture(add: FamilyList, counts: CaptureCounts) -> None:
    """Add the metrics of captured records, dropped records and stored bytes."""
    records = {(task,): count for task, count in counts.records.items()}
    add.counter(Metric.capture_records, "Requests that were captured.", records, "task")
    dropped = {(reason.value,): counts.dropped[reason] for reason in Dropped}
    add.counter(Metric.capture_dropped, "Requests that were not captured.", dropped, "reason")
    add.gauge(Metric.capture_stored_bytes, "Size of the capture folder in bytes.", counts.stored_bytes)


def add_api_keys(add: FamilyList, counts: ServerCounters) -> None:
    """Add the metrics of requests by the name of their API key."""
    by_key = counts.by_key
    for name, text, attribute in (
        (Metric.api_key_requests, "Requests that were accepted, by API key.", "requests"),
        (Metric.api_key_request_success, "Finished requests, by API key.", "finished"),
        (Metric.api_key_prompt_tokens, "Prompt tokens of accepted requests, by API key.", "prompt_tokens"),
        (Metric.api_key_generation_tokens, "Generated tokens, by API key.", "generation_tokens"),
    ):
        add.counter(name, text, {(key,): getattr(one, attribute) for key, one in by_key.items()}, "api_key")
    for name, text, attribute in (
        (Metric.api_key_time_to_first_token_seconds, "Time from the start of a request to its first token", "ttft"),
        (Metric.api_key_e2e_request_latency_seconds, "Time from the start of a request to its last token", "e2e"),
    ):
        times = [((key,), getattr(one, attribute)) for key, one in by_key.items()]
        histograms = [(key, one.counts, one.sum) for key, one in times]
        add.histogram(name, f"{text}, by API key.", LATENCY_EDGES, histograms, "api_key")


# Metrics under vLLM's names, for the clients, endpoint pickers and autoscalers that read those of vLLM.

VLLM_METRICS = frozenset(
    {
        Metric.num_requests_running,
        Metric.num_requests_waiting,
        Metric.kv_cache_usage_perc,
        Metric.num_preemptions,
        Metric.prefix_cache_queries,
        Metric.prefix_cache_hits,
        Metric.prompt_tokens,
        Metric.generation_tokens,
        Metric.request_success,
        Metric.request_prompt_tokens,
        Metric.request_generation_tokens,
        Metric.time_to_first_token_seconds,
        Metric.inter_token_latency_seconds,
        Metric.request_time_per_output_token_seconds,
        Metric.e2e_request_latency_seconds,
        Metric.request_queue_time_seconds,
        Metric.num_drafts,
        Metric.num_draft_tokens,
        Metric.num_accepted_tokens,
        Metric.num_accepted_tokens_per_pos,
    }
)
"""Metrics that vLLM 0.33 has with the same meaning. Its name has ``vllm:`` in place of our prefix."""
VLLM_CACHE_CONFIG = "vllm:cache_config_info"
"""Gauge of vLLM whose labels have the size and the number of blocks of the KV cache; endpoint pickers read them."""
_ENGINE = "0"
"""Value of vLLM's label ``engine``, the index of a data-parallel engine. A worker has one engine."""


def vllm_name(name: str) -> str:
    """Return vLLM's name of one of VLLM_METRICS or of its samples."""
    return "vllm:" + name.removeprefix("specdecode_")


def under_vllm_names(families: Iterable[Family], report: Report) -> Iterator[Family]:
    """Yield the families that vLLM has too under its names and labels, and the properties of the KV cache."""
    yield from (_under_vllm_name(family) for family in families if family.name in VLLM_METRICS)
    labels = {"model_name": report.model, "engine": _ENGINE}
    info = Family(VLLM_CACHE_CONFIG, "Size and number of the blocks of the KV cache.", "gauge")
    blocks = {"block_size": str(BLOCK_SIZE), "num_gpu_blocks": str(report.kv_tokens_total // BLOCK_SIZE)}
    info.add_sample(VLLM_CACHE_CONFIG, labels | blocks, 1.0)
    yield info


def _under_vllm_name(family: Family) -> Family:
    """Return the sums over tasks: vLLM has no tasks."""
    sums: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in family.samples:
        labels = tuple((label, value) for label, value in sample.labels.items() if label != "task")
        sums[sample.name, labels] += sample.value
    renamed = Family(vllm_name(family.name), family.documentation, family.type)
    for (name, labels), value in sums.items():
        renamed.add_sample(vllm_name(name), {**dict(labels), "engine": _ENGINE}, value)
    return renamed


# Text exposition of all metrics, the response of /metrics.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def families_of(report: Report, counts: ServerCounters, *, vllm_names: bool = True) -> FamilyList:
    """Return all metrics, with ``vllm_names`` also those under vLLM's names."""
    add = FamilyList(report.model)
    add_speculation(add, report, counts)
    add_traffic(add, report, counts)
    add_latency(add, report, counts)
    if vllm_names:
        add.families += under_vllm_names(tuple(add.families), report)
    add_capture(add, counts.capture)
    add_api_keys(add, counts)
    return add


def render(report: Report, counts: ServerCounters, *, vllm_names: bool = True) -> bytes:
    """Return all metrics in the Prometheus text format, see `families_of`."""
    registry = CollectorRegistry()
    registry.register(families_of(report, counts, vllm_names=vllm_names))
    return generate_latest(registry)
