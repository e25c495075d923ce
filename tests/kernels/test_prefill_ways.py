"""Attention of prompt chunks in other ways than our kernel: equal results, and the choice from measured times."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from specdecode_kernels import timings
from specdecode_kernels.timings import Timings
from specdecode_kernels.tree_attention import op, plan, prefill
from specdecode_worker.core import device_state as paged_cache
from specdecode_worker.core.messages import Submit
from specdecode_worker.sampling.params import Sampling
from support.kernels.attention_cases import BLOCK, Case, by_definition, chain, chunk, close, make, prepare, tree
from support.small_llama import engine_of, networks, plan_of, texts

pytestmark = pytest.mark.slow

KV_HEADS, GROUPS, SIZE = 2, 3, 16
KEY = (KV_HEADS * GROUPS, KV_HEADS, SIZE)
BATCHES = {
    "a chunk alone": (chunk(0, 17),),
    "a later chunk alone": (chunk(9, 11),),
    "chunks behind decoding rows": (tree(7, 0, 0, 1), chain(13, 4), chunk(9, 11), chunk(0, 70)),
    "a short chunk before a long one": (tree(5), chunk(6, 3), chunk(2, 12)),
}
IN_OTHER_WAYS = dict.fromkeys(BATCHES, 1) | {"chunks behind decoding rows": 2}
WAYS = pytest.mark.parametrize("way", prefill.WAYS)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let chunks of 8 queries take other ways, in fp32 too, which the interpreter computes exactly."""
    monkeypatch.setattr(prefill, "LEAST_QUERIES", 8)
    monkeypatch.setattr(prefill, "DTYPES", (torch.float32,))
    before = timings.current()
    yield
    timings.use(before)


def measure(key: tuple[int, int, int] = KEY, **microseconds: float) -> None:
    """Set the times of every way, at any number of keys."""
    timings.use(Timings("a GPU", prefill=(timings.Case(key, 8192, microseconds),)))


def case_of(name: str) -> Case:
    return make(BATCHES[name], kv=KV_HEADS, groups=GROUPS, scattered=True, dtype=torch.float32, size=SIZE)


def prepared_chunks(case: Case) -> op.Prepared:
    return prepare(case, chunk_keys=[s.keys if s.parents is None else 0 for s in case.sequences])


@pytest.mark.usefixtures("on_kernels")
@WAYS
@pytest.mark.parametrize("name", BATCHES)
def test_every_way_equals_the_definition(name: str, way: str) -> None:
    measure(kernel=2.0, **{way: 1.0})
    case = case_of(name)
    prepared = prepared_chunks(case)
    assert [chunk.way for chunk in prepared.chunks] == [prefill.WAYS[way]] * IN_OTHER_WAYS[name]
    assert (prepared.plan is None) == (IN_OTHER_WAYS[name] == len(case.sequences))
    output = op.attend(case.q_THD, case.cache_2NPKD, prepared)
    assert output.shape == case.q_THD.shape
    assert close(output, by_definition(case))


@pytest.mark.usefixtures("on_kernels")
def test_queries_may_be_part_of_a_wider_tensor() -> None:
    measure(kernel=2.0, sdpa=1.0)
    case = case_of("chunks behind decoding rows")
    wide = torch.full((len(case.q_THD), 10, SIZE), torch.nan)
    wide[:, 2:8] = case.q_THD
    assert close(op.attend(wide[:, 2:8], case.cache_2NPKD, prepared_chunks(case)), by_definition(case))


@pytest.mark.usefixtures("on_kernels")
def test_our_kernel_attends_unless_another_way_is_faster() -> None:
    case = case_of("chunks behind decoding rows")
    for times in ({"kernel": 1.0, "sdpa": 2.0}, {"flashinfer": 1.0}, {}):
        measure(**times)
        assert not prepared_chunks(case).chunks
    assert close(op.attend(case.q_THD, case.cache_2NPKD, prepared_chunks(case)), by_definition(case))


@WAYS
def test_results_follow_the_keys_of_the_chunk(way: str) -> None:
    """Queries see exactly the keys up to their own: a change of a later key changes nothing before it."""
    case = case_of("a later chunk alone")
    made = prefill.last_chunks((20,), (11,), case.table_BM, BLOCK, lambda *_: way)[0]
    before = prefill.attend(case.q_THD, case.cache_2NPKD, made)
    block, offset = case.blocks[0][15 // BLOCK], 15 % BLOCK
    case.cache_2NPKD[:, block, offset] += 1
    changed = (prefill.attend(case.q_THD, case.cache_2NPKD, made) != before).flatten(1).any(1)
    assert changed.tolist() == [False] * 6 + [True] * 5


def test_choice_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    measure(kernel=2.0, sdpa=1.0)
    chosen = [
        prefill.choose(*KEY, queries, keys, dtype)
        for queries, keys, dtype in (
            (256, 512, torch.bfloat16),
            (255, 512, torch.bfloat16),
            (256, 512, torch.float32),
            (256, 2**20, torch.bfloat16),
            (256, 2**20 + 1, torch.bfloat16),
        )
    ]
    assert chosen == ["sdpa", "kernel", "kernel", "sdpa", "kernel"]
    assert prefill.choose(4, 2, 16, 256, 512, torch.bfloat16) == "kernel", "another model was not measured"


def test_ways_that_may_be_chosen_are_run_at_startup() -> None:
    measure(kernel=2.0, sdpa=1.0)
    assert prefill.warm_up(*KEY, torch.float32, torch.device("cpu")) == ["sdpa"]
    measure(kernel=1.0, sdpa=2.0)
    assert prefill.warm_up(*KEY, torch.float32, torch.device("cpu")) == []


def test_texts_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt chunks share steps with decoding rows, and follow cached prefixes and earlier chunks.

    Only attention takes its GPU path, because interpreting everything takes minutes.
    """
    monkeypatch.setattr(op, "dispatch", SimpleNamespace(on_gpu=lambda _: True))
    monkeypatch.setattr(plan, "processors", lambda _: 1)
    monkeypatch.setattr(prefill, "LEAST_QUERIES", 2)
    monkeypatch.setattr(paged_cache, "attends", lambda *_: False)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 61, (length,), generator=generator).tolist() for length in (36, 10, 12)]
    prompts[2] = prompts[0][:20] + prompts[2]
    requests = [
        Submit(request_id=str(i), prompt=tuple(prompt), sampling=Sampling(max_tokens=3, seed=i, temperature=0.0))
        for i, prompt in enumerate(prompts)
    ]
    chunks: list[tuple[int, int]] = []
    attend = prefill.attend

    def watched(q_THD: Tensor, cache_2NPKD: Tensor, chunk: prefill.Chunk) -> Tensor:
        chunks.append((chunk.queries.stop - chunk.queries.start, chunk.keys))
        return attend(q_THD, cache_2NPKD, chunk)

    monkeypatch.setattr(prefill, "attend", watched)
    pair = networks(torch.float32)
    config = pair.target.config
    answers = []
    for times in ({"sdpa": 2.0}, {"sdpa": 0.5}):
        measure((config.num_attention_heads, config.num_key_value_heads, config.head_dim), kernel=1.0, **times)
        engine = engine_of(pair, budget=24)
        engine.set_plan(plan_of("chain:1"))
        answers.append(texts(engine, requests))
        assert bool(chunks) == (len(answers) == 2)
    assert answers[0] == answers[1]
    assert any(keys > queries for queries, keys in chunks), "a chunk follows keys in the cache"
