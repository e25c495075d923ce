"""Tests of /metrics, parsed by the Prometheus client library."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdecode_worker.capture import Dropped
from specdecode_worker.contract import (
    AcceptanceCell,
    DraftState,
    GuardCell,
    HistogramCounts,
    LatencyHistogram,
    MemoryState,
    Metric,
    PhaseSeconds,
    PlanState,
    Report,
    StepCell,
    SyntheticKnobs,
    TaskCell,
    TrafficCell,
)
from specdecode_worker.core.messages import FinishReason, Tokens
from specdecode_worker.metrics import MAX_API_KEYS, VLLM_METRICS, RequestCounter, ServerCounters, render, vllm_name

STEP = StepCell(
    tokens_bucket=1, draft_passes=0, prefill=False, context_bucket=0, count=4, x=(), xx=(), xt=(), t=0, tt=0,
    device_seconds=1, wall_seconds=2.5, clipped=0, emitted=4,
)  # fmt: skip
REPORT = Report(
    boot_id="b",
    worker="w",
    clock_seconds=1,
    model="m",
    plan=PlanState(version=9),
    synthetic=SyntheticKnobs(),
    running=2,
    waiting=3,
    kv_tokens_total=100,
    kv_tokens_used=25,
    drafts=10,
    draft_tokens=30,
    accepted_tokens=12,
    traffic=(
        TrafficCell(task="t", arrivals=4, finished=3, prompt_tokens=50, cached_tokens=5, output_tokens=60),
        TrafficCell(task="other", arrivals=1, finished=1, prompt_tokens=1, cached_tokens=0, output_tokens=2),
    ),
    latency=tuple(
        LatencyHistogram(name=name, edges=(0.1, 0.2), counts=(5, 0, 2), sum=1.5)
        for name in ("ttft", "ttit", "e2e", "queue")
    ),
    steps=(STEP, STEP),
    plain_steps=8,
    preemptions=6,
    prefill_chunks=5,
    prefix_query_tokens=80,
    prefix_hit_tokens=48,
    kv_tokens_cached=10,
    phases=PhaseSeconds(draft=1, verify=2, sample=3, bookkeeping=4),
    memory=MemoryState(limit=100, weights=40, drafts=5, kv_cache=30, reserve=20),
    draft=DraftState(method="eagle3", hash="h1", uri="hf://a/b"),
    named_drafts=(DraftState(name="code", problem="fc.weight is missing"),),
    acceptance=(
        AcceptanceCell(draft="h1", task="t", sampled=True, depth=1, parent="main", ranks=(9, 1, 0, 0, 0, 0, 0, 0, 4)),
        AcceptanceCell(draft="h1", task="t", sampled=False, depth=1, parent="main", ranks=(1, 0, 0, 0, 0, 0, 0, 0, 1)),
    ),
    guard=(GuardCell(concurrency=0, context=0, speculative=2, plain=1, suppressed=True),),
)

BY_TASK = REPORT.model_copy(update={"tasks": (
    TaskCell(
        task="t",
        ttft=HistogramCounts(counts=(4, 0, 0), sum=0.2),
        itl=HistogramCounts(counts=(0, 0, 2), sum=0.6),
        decode_steps=20,
        decode_tokens=50,
        drafts=7,
        draft_tokens=21,
        accepted_tokens=9,
    ),
    TaskCell(
        task="other",
        ttft=HistogramCounts(counts=(1, 0, 2), sum=1.3),
        itl=HistogramCounts(counts=(5, 0, 0), sum=0.9),
        decode_steps=3,
        decode_tokens=3,
        drafts=3,
        draft_tokens=9,
        accepted_tokens=3,
    ),
)})  # fmt: skip


def still() -> ServerCounters:
    """Return counts with a clock that does not advance."""
    return ServerCounters(lambda: 0.0)


def samples(counts: ServerCounters | None = None, report: Report = REPORT) -> dict[str, float]:
    """Return the value of each sample, keyed by name and label values."""
    values = {}
    for family in text_string_to_metric_families(render(report, counts or still()).decode()):
        for sample in family.samples:
            labels = ",".join(value for name, value in sorted(sample.labels.items()) if name != "model_name")
            values[f"{sample.name}[{labels}]"] = sample.value
    return values


def count_request(counts: ServerCounters, task: str, *sums: tuple[int, int, int]) -> None:
    """Count a request of ``task`` with messages of these cumulative (drafts, draft tokens, accepted)."""
    request_counter = RequestCounter(counts, task, 7)
    for drafts, draft_tokens, accepted in sums:
        request_counter.process(
            Tokens(request_id="r", tokens=(), drafts=drafts, draft_tokens=draft_tokens, accepted=accepted)
        )


def test_all_contract_metrics_are_exposed() -> None:
    counts = still()
    count_request(counts, "t", (1, 3, 2))
    text = render(REPORT, counts).decode()
    assert {name for name in Metric if f"# TYPE {name}" not in text} == set()


def test_metric_values_equal_the_report() -> None:
    values = samples()
    assert values["specdecode_num_requests_running[]"] == 2
    assert values["specdecode_num_requests_waiting[]"] == 3
    assert values["specdecode_kv_cache_usage_perc[]"] == 0.25
    assert values["specdecode_plan_version[]"] == 9
    assert values["specdecode_guard_suppressed[]"] == values["specdecode_synthetic[]"] == 1
    assert values["specdecode_generation_tokens_total[t]"] == 60
    assert values["specdecode_num_preemptions_total[]"] == 6
    assert values["specdecode_prefill_chunks_total[]"] == 5
    assert values["specdecode_prefix_cache_queries_total[]"] == 80
    assert values["specdecode_prefix_cache_hits_total[]"] == 48
    assert values["specdecode_kv_cache_reusable_perc[]"] == 0.1
    assert values["specdecode_spec_decode_num_plain_steps_total[]"] == 8
    assert values["specdecode_memory_bytes[kv_cache]"] == 30
    phases = [values[f"specdecode_step_phase_seconds_total[{phase}]"] for phase in PhaseSeconds.model_fields]
    assert phases == [1, 2, 3, 4]
    assert values["specdecode_guard_state[0,0]"] == 1
    assert values["specdecode_guard_time_per_token_seconds[0,0,speculative]"] == 2
    assert (values["specdecode_iteration_seconds_count[]"], values["specdecode_iteration_seconds_sum[]"]) == (8, 5)
    assert values["specdecode_spec_decode_num_ranked_total[1,0,t]"] == 10, "of greedy and sampled requests"
    assert values["specdecode_spec_decode_num_ranked_total[1,miss,t]"] == 5
    assert values["specdecode_draft_info[,h1,eagle3,,hf://a/b]"] == 1
    assert values["specdecode_draft_info[code,,none,fc.weight is missing,]"] == 1


def test_shapes_of_one_plan_bucket_are_one_series() -> None:
    """Tasks run several shapes at one load. Prometheus warns of a sample that comes twice, and drops it."""
    stopped = GuardCell(concurrency=0, context=0, speculative=2, plain=1, suppressed=True)
    faster = GuardCell(concurrency=0, context=0, speculative=0.5, plain=1, suppressed=False)
    for cells, is_suppressed in (((stopped, faster), 0), ((faster, stopped), 0), ((stopped, stopped), 1)):
        report = REPORT.model_copy(update={"guard": cells})
        lines = [line for line in render(report, still()).decode().splitlines() if not line.startswith("#")]
        series = [line.rpartition(" ")[0] for line in lines]
        assert len(set(series)) == len(series)
        values = samples(report=report)
        assert values["specdecode_guard_state[0,0]"] == values["specdecode_guard_suppressed[]"] == is_suppressed
        seconds = values["specdecode_guard_time_per_token_seconds[0,0,speculative]"]
        assert seconds == min(cell.speculative or 0.0 for cell in cells)


def test_histograms_accumulate() -> None:
    values = samples()
    name = "specdecode_time_to_first_token_seconds"
    assert [values[f"{name}_bucket[{edge},other]"] for edge in ("0.1", "0.2", "+Inf")] == [5, 5, 7]
    assert (values[f"{name}_count[other]"], values[f"{name}_sum[other]"]) == (7, 1.5)
    name = "specdecode_e2e_request_latency_seconds"
    assert [values[f"{name}_bucket[{edge}]"] for edge in ("0.1", "0.2", "+Inf")] == [5, 5, 7]


def test_latency_by_task_adds_up_to_the_report() -> None:
    values = samples(report=BY_TASK)
    for name in ("specdecode_time_to_first_token_seconds", "specdecode_inter_token_latency_seconds"):
        assert sum(values[f"{name}_count[{task}]"] for task in ("t", "other")) == 7
        assert sum(values[f"{name}_sum[{task}]"] for task in ("t", "other")) == pytest.approx(1.5)
    assert values["specdecode_time_to_first_token_seconds_bucket[0.1,t]"] == 4
    assert values["specdecode_inter_token_latency_seconds_bucket[0.1,other]"] == 5
    tokens, steps = (values[f"specdecode_spec_decode_num_decode_{name}_total[t]"] for name in ("tokens", "steps"))
    assert tokens / steps == 2.5


def test_timeouts_are_counted_by_reason() -> None:
    counts = still()
    for finish in ("deadline", "deadline", "queue_timeout", "stop"):
        RequestCounter(counts, "t", 7).process(Tokens(request_id="r", tokens=(), finish=finish))
    values = samples(counts)
    assert values["specdecode_request_timeouts_total[deadline]"] == 2
    assert values["specdecode_request_timeouts_total[queue]"] == 1


def test_requests_are_counted_by_the_reason_of_their_end() -> None:
    """A stop string ends a request at the server: the engine aborts it and does not count it as finished."""
    counts = ServerCounters(lambda: 0.0, api_keys=True)
    ends: tuple[tuple[FinishReason | None, str | None], ...] = (
        ("stop", "stop"), (None, "stop"), ("length", "length"), ("deadline", None), (None, None), ("error", None),
    )  # fmt: skip
    for engine_finish, finish_reason in ends:
        request_counter = RequestCounter(counts, "t", 7, "ann")
        request_counter.process(Tokens(request_id="r", tokens=(5,), finish=engine_finish))
        request_counter.end(finish_reason)
    values = samples(counts)
    for reason, count in {"stop": 2, "length": 1, "abort": 2, "error": 1}.items():
        assert values[f"specdecode_request_success_total[{reason},t]"] == count, reason
        assert values[f"specdecode_request_success_total[{reason},other]"] == 0, "there before the first request"
    assert values["specdecode_api_key_request_success_total[ann]"] == 3
    assert values["specdecode_api_key_e2e_request_latency_seconds_count[ann]"] == 3


def count_keys(counts: ServerCounters, *names: str) -> None:
    for name in names:
        request_counter = RequestCounter(counts, "t", 30, name)
        request_counter.process(Tokens(request_id="r", tokens=(5, 6), finish="stop"))
        request_counter.end("stop")


def test_requests_are_counted_by_api_key() -> None:
    counts = ServerCounters(lambda: 0.0, api_keys=True)
    count_keys(counts, "ann", "bob", "ann", "")
    values = samples(counts)
    assert values["specdecode_api_key_requests_total[ann]"] == 2
    assert values["specdecode_api_key_request_success_total[ann]"] == 2
    assert values["specdecode_api_key_prompt_tokens_total[ann]"] == 60
    assert values["specdecode_api_key_generation_tokens_total[bob]"] == 2
    assert values["specdecode_api_key_time_to_first_token_seconds_count[ann]"] == 2
    assert values["specdecode_api_key_e2e_request_latency_seconds_count[bob]"] == 1


def test_continued_request_is_counted_once_over_both_workers() -> None:
    first, second = (ServerCounters(lambda: 0.0, api_keys=True) for _ in range(2))
    moved = RequestCounter(first, "t", 30, "ann")
    moved.process(Tokens(request_id="r", tokens=(5, 6, 7)))
    moved.end(None, moved=True)
    rest = RequestCounter(second, "t", 30, "ann", 3)
    rest.process(Tokens(request_id="r", tokens=(8, 9), finish="stop"))
    rest.end("stop")
    parts = samples(first), samples(second)
    for name, expected in {
        "requests_total": 1,
        "request_success_total": 1,
        "prompt_tokens_total": 30,
        "generation_tokens_total": 5,
        "time_to_first_token_seconds_count": 1,
        "e2e_request_latency_seconds_count": 0,
    }.items():
        assert sum(values[f"specdecode_api_key_{name}[ann]"] for values in parts) == expected, name
    assert sum(values["specdecode_request_success_total[stop,t]"] for values in parts) == 1
    sizes = [(sum(one.counts), one.sum) for one in (first.generation_tokens, second.generation_tokens)]
    assert sizes == [(0, 0), (1, 5)]
    assert sum(first.prompt_tokens.counts) + sum(second.prompt_tokens.counts) == 1


def test_number_of_api_key_names_is_bounded() -> None:
    counts = ServerCounters(lambda: 0.0, api_keys=True)
    count_keys(counts, *(f"key{number}" for number in range(MAX_API_KEYS + 8)), "key0")
    names = {name for name in samples(counts) if name.startswith("specdecode_api_key_requests_total")}
    assert len(names) == MAX_API_KEYS + 1
    assert samples(counts)["specdecode_api_key_requests_total[other]"] == 8
    assert samples(counts)["specdecode_api_key_requests_total[key0]"] == 2


def test_api_key_names_are_not_exported_by_default() -> None:
    counts = still()
    count_keys(counts, "ann")
    assert not [name for name in samples(counts) if name.startswith("specdecode_api_key") and "[" in name]


def test_speculation_by_task_is_that_of_the_report() -> None:
    """A client that reads slowly has not seen what the engine counted: `other` would fall when it reads."""
    counts = still()
    for read in ((2, 6, 5), (3, 9, 7)):
        count_request(counts, "t", read)
        values = samples(counts, BY_TASK)
        for name, by_task in {"drafts": (7, 3), "draft_tokens": (21, 9), "accepted_tokens": (9, 3)}.items():
            found = [values[f"specdecode_spec_decode_num_{name}_total[{task}]"] for task in ("t", "other")]
            assert found == list(by_task), name


def test_accepted_tokens_are_counted_by_position() -> None:
    counts = still()
    count_request(counts, "t", (1, 3, 2), (2, 6, 5))
    count_request(counts, "t", (1, 3, 0))
    values = samples(counts)
    positions = [values[f"specdecode_spec_decode_num_accepted_tokens_per_pos_total[{p},t]"] for p in "012"]
    assert positions == [2, 2, 1]


def test_counters_do_not_fall_when_a_request_is_cancelled() -> None:
    counts = still()
    request_counter = RequestCounter(counts, "t", 7)
    request_counter.process(Tokens(request_id="r", tokens=(1, 2), drafts=1, draft_tokens=3, accepted=1))
    request_counter.process(Tokens(request_id="r", tokens=(), finish="deadline"))
    assert samples(counts)["specdecode_spec_decode_num_accepted_tokens_per_pos_total[0,t]"] == 1


def test_request_is_counted_once() -> None:
    now = 0.0
    counts = ServerCounters(lambda: now)
    request_counter = RequestCounter(counts, "t", 30)
    for now, tokens in ((1.0, (5, 6)), (1.001, (7,)), (1.002, ())):  # noqa: B007
        request_counter.process(Tokens(request_id="r", tokens=tokens))
    request_counter.end("stop")
    RequestCounter(counts, "t", 9).end(None)
    values = samples(counts)
    assert values["specdecode_request_prompt_tokens_sum[]"] == 30
    name = "specdecode_request_generation_tokens"
    assert (values[f"{name}_sum[]"], values[f"{name}_count[]"]) == (3, 1)
    name = "specdecode_request_time_per_output_token_seconds"
    assert (values[f"{name}_bucket[0.0005]"], values[f"{name}_count[]"]) == (1, 1), "1 ms for two tokens"


def test_captured_and_dropped_records_are_counted() -> None:
    counts = still()
    counts.capture.records["t"] += 3
    counts.capture.dropped[Dropped.queue_full] += 2
    counts.capture.stored_bytes = 99
    values = samples(counts)
    assert values["specdecode_capture_records_total[t]"] == 3
    assert values["specdecode_capture_dropped_total[queue_full]"] == 2
    assert values["specdecode_capture_dropped_total[redacted]"] == 0, "there before anything is dropped"
    assert values["specdecode_capture_stored_bytes[]"] == 99


# Clients of vLLM, as they select metrics. Names and rules are those of the named sources, read on 2026-11-27.

CLIENT_METRICS = {
    "vllm:prefix_cache_hits": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:cache_config_info": "gauge",
}
"""Families by type that these clients read, as far as we have them:

- AIPerf 0.13, server_metrics/accumulator.py and kubernetes/server_metrics_projection.py
- inference-perf, client/modelserver/vllm_client.py (2026-08-19)
- llm-d's router, engine ``vllm`` (its default) of .../datalayer/extractor/metrics/factories.go (2026-05-17)
- KEDA in vLLM's production stack, helm/templates/scaledobject-vllm.yaml (2026-08-05)
"""


def vllm_text() -> str:
    counts = still()
    count_request(counts, "t", (1, 3, 2), (2, 6, 5))
    count_request(counts, "other", (3, 9, 3))
    for task, reason in (("t", "stop"), ("t", "length"), ("other", "stop")):
        RequestCounter(counts, task, 7).end(reason)
    return render(BY_TASK, counts).decode()


def missing(text: str) -> set[str]:
    """Return the families that a client does not find with their type and the labels that it filters by."""
    found = {
        family.name: family.type
        for family in text_string_to_metric_families(text)
        if family.samples and all({"model_name", "engine"} <= sample.labels.keys() for sample in family.samples)
    }
    return {name for name, kind in CLIENT_METRICS.items() if found.get(name) != kind}


def test_clients_of_vllm_find_their_metrics() -> None:
    assert missing(vllm_text()) == set()
    assert missing(render(REPORT.model_copy(update={"traffic": ()}), still()).decode()) == set(), "at the start"
    for name in CLIENT_METRICS:
        assert missing(vllm_text().replace(name, f"{name}s")) == {name}, "a planted rename is noticed"


def bench_serve(text: str) -> tuple[int, int, int, dict[int, int]] | None:
    """Return drafts, draft tokens, accepted tokens and those by position as `vllm bench serve` 0.33 reads them.

    Its rule (vllm/benchmarks/serve.py): lines that begin with vllm:spec_decode, of metrics that end with _total, and
    then substrings of the name in this order.
    """
    sums, positions = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}, dict[int, int]()
    lines = [line for line in text.splitlines() if line.startswith("vllm:spec_decode")]
    lines = [line for line in lines if line.split("{")[0].endswith("_total")]
    for line in lines:
        name, value = line.split("{")[0], int(float(line.rsplit(None, 1)[-1]))
        if "num_accepted_tokens_per_pos" in name:
            positions[int(line.split('position="')[1].split('"')[0])] = value
        else:
            sums[next(key for key in sums if key in name)] += value
    return (*sums.values(), positions) if lines else None  # type: ignore[return-value]


def test_bench_serve_finds_the_acceptance() -> None:
    assert bench_serve(vllm_text()) == (10, 30, 12, {0: 3, 1: 3, 2: 2})
    assert bench_serve(render(REPORT, still()).decode()) == (0, 0, 0, {}), "before the first request"
    assert bench_serve(vllm_text().replace("vllm:spec_decode", "vllm:speculation")) is None


def test_values_under_vllm_names_are_the_sums_of_ours_over_tasks() -> None:
    ours: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    theirs = dict(ours)
    exported = set()
    for family in text_string_to_metric_families(vllm_text()):
        is_theirs = family.name.startswith("vllm:")
        exported |= {family.name} if is_theirs else set()
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "m"
            assert labels.pop("engine", None) == ("0" if is_theirs else None)
            labels.pop("task", None)
            key = (sample.name if is_theirs else vllm_name(sample.name), tuple(sorted(labels.items())))
            into = theirs if is_theirs else ours
            into[key] = into.get(key, 0) + sample.value
    assert exported == {vllm_name(name) for name in VLLM_METRICS} | {"vllm:cache_config_info"}
    blocks = (("block_size", "16"), ("num_gpu_blocks", "6"))
    assert theirs.pop(("vllm:cache_config_info", blocks)) == 1, "labels that llm-d's endpoint picker reads"
    assert theirs == {key: ours[key] for key in theirs}
    assert theirs["vllm:request_success_total", (("finished_reason", "stop"),)] == 2
    assert theirs["vllm:generation_tokens_total", ()] == 62


def test_vllm_names_can_be_switched_off() -> None:
    assert "vllm:" not in render(REPORT, still(), vllm_names=False).decode()
