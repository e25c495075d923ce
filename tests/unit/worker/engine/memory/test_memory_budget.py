"""Memory budget: monotone in every argument, and consistent with itself."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.contract import EngineConfig
from specdecode_worker.core.kv_cache import BLOCK_SIZE
from specdecode_worker.engine.memory import (
    GPU_SAMPLING_BYTES,
    GRAPH_BYTES,
    GRAPH_TABLE_BYTES,
    SAMPLING_BYTES,
    SLACK_TOKENS,
    Budget,
    Device,
    Inventory,
    Network,
    kv_cache_bytes,
    kv_tokens,
    make_verdict,
)
from specdecode_worker.engine.step_tables import MOST_GRAPHS

GIB = 2**30


def network(name: str = "target", **changed: Any) -> Network:
    """Return a network like Llama-3.1-8B in bf16. A draft is like an EAGLE-3 head for it."""
    fields: dict[str, Any] = {
        "name": name,
        "weights": 16_060_522_496,
        "tables": 2 * 131072 * 128 * 4,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "kv_layers": 32,
    }
    if name != "target":
        fields |= {"weights": 850_000_000, "kv_layers": 1}
    return Network(**fields | changed)


def budget(
    gib: float = 80,
    *,
    draft: bool = True,
    kind: Any = "cuda",
    free: float | None = None,
    max_model_len: int = 8192,
    dtype_bytes: int = 2,
    graph_rows: int = 0,
    **engine: Any,
) -> Budget:
    limit = int(gib * GIB)
    graphs = {"enforce_eager": not graph_rows, "cuda_graph_sizes": (graph_rows,) if graph_rows else ()}
    return Budget(
        device=Device(kind=kind, limit=limit, free=limit if free is None else int(free * GIB), source="GPU memory"),
        engine=EngineConfig(**graphs, **engine),
        max_model_len=max_model_len,
        dtype_bytes=dtype_bytes,
        target=network(),
        drafts=(network("draft"),) if draft else (),
        aux_size=3 * 4096 if draft else 0,
    )


def test_llama_8b_on_80_gib_by_hand() -> None:
    memory_budget = budget()
    assert memory_budget.bytes_per_token == 2 * 33 * 8 * 128 * 2
    in_fp8 = budget(kv_cache_dtype="fp8").bytes_per_token
    assert in_fp8 == 2 * 32 * 8 * 128 + 2 * 8 * 128 * 2, "drafts keep their format"
    spent = memory_budget.runtime + 16_060_522_496 + 850_000_000 + memory_budget.state + memory_budget.activations
    assert memory_budget.kv_bytes_left == int(0.8 * 80 * GIB) - spent
    assert verdict_of(memory_budget).warnings == ()


def test_graphs_reduce_the_memory_left_for_keys() -> None:
    """Graphs reduce the memory that is left for keys.

    Their pool holds the largest captured step: 128 tokens of the widest layer, logits and states; 64 rows of adjusted
    logits; the counts of 17 texts; and a mask of every packed token.
    """
    without, memory_budget = budget(), budget(graph_rows=16)
    widest = 4 * 4096 + 4 * memory_budget.target.intermediate_size
    vocab_size = memory_budget.target.vocab_size
    pool = 128 * 2 * (widest + 2 * vocab_size + 3 * 4096) + 64 * vocab_size * 24 + 17 * vocab_size * 9
    pool += (memory_budget.engine.max_num_batched_tokens + 1) * vocab_size // 8
    assert memory_budget.graphs == pool + MOST_GRAPHS * (GRAPH_BYTES + 16 * GRAPH_TABLE_BYTES)
    assert memory_budget.kv_bytes_left == without.kv_bytes_left - memory_budget.graphs
    assert (without.graphs, budget(graph_rows=16, kind="cpu").graphs) == (0, 0)
    assert any("CUDA graphs of up to 16 sequences" in line for line in verdict_of(memory_budget).arithmetic)


def test_graphs_of_several_devices_hold_gathered_logits() -> None:
    """The first of four devices holds its quarter of the logits and those that it gathers, too."""
    one = budget(graph_rows=16)
    four = replace(one, device=replace(one.device, count=4))
    assert four.graphs == one.graphs + 128 * 2 * (one.target.vocab_size + one.target.vocab_size // 4)


GPUS = {80: 375_000, 141: 776_000}
"""Tokens of keys and values, in round numbers, that Llama-3.1-8B with an EAGLE-3 head leaves on GPUs of so many GB."""


@pytest.mark.parametrize("gigabytes", GPUS)
def test_defaults_of_a_gpu_leave_its_memory_to_keys(gigabytes: int) -> None:
    """A GPU's kernels build no mask and keep noise in registers, so prompts of 131,072 tokens cost no activations."""
    config = EngineConfig(device="cuda")
    memory_budget = budget(
        gigabytes * 1e9 / GIB,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=131_072,
        gpu_memory_utilization=config.gpu_memory_utilization,
        graph_rows=config.max_num_seqs,
    )
    rows, tokens = 8 * 64, 2048
    assert memory_budget.activations == rows * 128_256 * (GPU_SAMPLING_BYTES + 2) + tokens * 3 * 4096 * 2
    assert memory_budget.activations < 2 * GIB
    assert memory_budget.spent < 20 * GIB, "weights are 16 of it"
    assert kv_tokens(memory_budget) == pytest.approx(GPUS[gigabytes], rel=0.02)


def test_attention_of_a_gpu_needs_partial_sums_and_no_mask() -> None:
    """With few sequences, the widest layer needs more than sampling; its partial sums have 128 rows for each tile."""
    wide = {"max_num_seqs": 1, "max_num_batched_tokens": 8192, "graph_rows": 1}
    short, long = budget(max_model_len=8192, **wide), budget(max_model_len=131_072, **wide)
    assert short.activations == long.activations
    partial = (8192 * 32 + (2 * 8 + 4 * 160) * 128) * 129 * 4
    assert short.activations == 8192 * 2 * (4 * 4096 + 4 * 14336 + 3 * 4096) + partial
    masked = budget(max_model_len=131_072, kind="cpu", **wide)
    assert masked.activations > 20 * long.activations


def test_multi_round_sampling_holds_probabilities() -> None:
    assert budget(sampler="mss").activations > 2 * budget().activations
    one, other = (budget(max_num_seqs=64, graph_rows=64, sampler=sampler).graphs for sampler in ("mss", "coupled"))
    assert one - other == 8 * 64 * 128_256 * SAMPLING_BYTES


def test_memory_of_other_processes_is_subtracted_once() -> None:
    alone, shared = budget(), budget(free=40)
    assert (alone.occupied, shared.occupied) == (0, int(0.8 * 80 * GIB) - 40 * GIB)
    assert shared.usable == 40 * GIB
    assert budget(free=70).kv_bytes_left == alone.kv_bytes_left, "it fits into the reserve"


SIZES = st.fixed_dictionaries(
    {
        "gib": st.floats(12, 140),
        "max_num_seqs": st.integers(1, 256),
        "max_num_batched_tokens": st.integers(16, 4096),
        "max_model_len": st.integers(16, 131072),
        "gpu_memory_utilization": st.floats(0.3, 1.0),
        "kind": st.sampled_from(["cpu", "cuda"]),
    }
)
WORSE: dict[str, Any] = {
    "gib": lambda x: x * 0.9,
    "max_num_seqs": lambda x: x + 7,
    "max_num_batched_tokens": lambda x: x + 100,
    "max_model_len": lambda x: x + 1000,
    "gpu_memory_utilization": lambda x: x * 0.9,
}


@given(SIZES, st.sampled_from(sorted(WORSE)))
def test_larger_settings_or_less_memory_never_leave_more(sizes: dict[str, Any], which: str) -> None:
    before, after = budget(**sizes), budget(**sizes | {which: WORSE[which](sizes[which])})
    assert after.room_tokens <= before.room_tokens
    assert before.fits or not after.fits
    assert after.room_tokens % BLOCK_SIZE == 0


@given(SIZES, st.sampled_from(["weights", "tables", "kv_layers", "kv_heads", "intermediate_size", "vocab_size"]))
def test_a_larger_network_never_leaves_more(sizes: dict[str, Any], field: str) -> None:
    before = budget(**sizes)
    larger = replace(before.target, **{field: 2 * getattr(before.target, field)})
    assert replace(before, target=larger).room_tokens <= before.room_tokens
    assert replace(before, drafts=()).room_tokens >= before.room_tokens


@given(SIZES)
def test_caches_never_exceed_the_memory(sizes: dict[str, Any]) -> None:
    memory_budget = budget(**sizes)
    if memory_budget.fits:
        assert kv_cache_bytes(memory_budget, kv_tokens(memory_budget)) <= memory_budget.kv_bytes_left
        assert kv_tokens(memory_budget) >= memory_budget.max_model_len + SLACK_TOKENS
        assert 1 <= memory_budget.sequences <= memory_budget.engine.max_num_seqs
    else:
        assert memory_budget.sequences == 0


@given(SIZES)
def test_max_fitting_model_len_fits_and_the_next_length_does_not(sizes: dict[str, Any]) -> None:
    memory_budget = budget(**sizes)
    if memory_budget.fits:
        assert memory_budget.max_fitting_model_len == memory_budget.max_model_len
    elif memory_budget.max_fitting_model_len:
        other = [replace(memory_budget, max_model_len=memory_budget.max_fitting_model_len + d).fits for d in (0, 1)]
        assert other == [True, False]
    assert memory_budget.max_model_len >= memory_budget.max_fitting_model_len


def test_requested_cache_tokens_are_allocated_or_refused() -> None:
    assert kv_tokens(budget(kv_cache_tokens=100_001)) == 100_016
    assert not budget(kv_cache_tokens=10_000_000).fits
    assert budget(kv_cache_tokens=1024).fits, "shorter than the model's limit: the engine bounds requests by it"


def test_a_cpu_cache_is_capped_at_the_need_of_a_full_batch() -> None:
    asked = budget(800, kind="cpu")
    assert kv_tokens(asked) == 16 * (8192 + SLACK_TOKENS)
    assert kv_tokens(budget(800)) > kv_tokens(asked)


def verdict_of(memory_budget: Budget) -> Any:
    return make_verdict(Inventory(budget=memory_budget))


def test_a_refusal_names_the_length_that_would_fit() -> None:
    verdict = verdict_of(budget(24, max_model_len=131072))
    length = budget(24, max_model_len=131072).max_fitting_model_len
    assert not verdict.serves
    assert 1000 < length < 131072
    assert f"set max_model_len to at most {length}" in verdict.problem
    assert "131,072 needs 131,136" in verdict.problem


@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        ({"kv_cache_tokens": 10**6}, "set kv_cache_tokens to at most"),
        ({"free": 10}, "free the 54.00 GiB that others use"),
        ({"gib": 16}, "lower max_num_seqs"),
        ({"gib": 16}, r"serve without the draft \(0.79 GiB\)"),
        ({"gib": 16, "dtype_bytes": 4}, "set dtype to bfloat16"),
        ({"gib": 16}, "take a larger GPU"),
    ],
)
def test_a_refusal_suggests_a_remedy(changed: dict[str, Any], remedy: str) -> None:
    verdict = verdict_of(budget(**changed))
    assert not verdict.serves
    assert re.search(remedy, verdict.problem), verdict.problem


def test_caches_are_as_large_as_the_gpu_of_a_draft_allows() -> None:
    """The draft has a copy of every block, whatever its own memory: 16 layers of keys on 24 GiB."""
    alone, draft = budget(draft=False), network("draft", weights=2_500_000_000, kv_layers=16)
    apart = replace(budget(24, draft=False), target=draft)
    beside = replace(alone, own=apart)
    assert kv_tokens(beside) == apart.room_tokens < kv_tokens(alone)
    assert kv_cache_bytes(apart, kv_tokens(beside)) <= apart.kv_bytes_left
    assert f"the draft's GPU has room for {apart.room_tokens:,} tokens" in verdict_of(beside).warnings[0]
    ample = replace(alone, own=replace(budget(80, draft=False), target=draft))
    assert (kv_tokens(ample), verdict_of(ample).warnings) == (kv_tokens(alone), ())


def test_a_verdict_fits_a_termination_message() -> None:
    problem = "x" * 5000
    long = make_verdict(Inventory(budget=budget(16, max_model_len=131072), draft_problem=problem))
    assert len(long.model_dump_json()) < 4096
