"""bf16 on a CPU with compiled blocks: a row's logits do not depend on the batch, bit for bit.

Every row is computed separately, so texts are compared exactly, without an exception for near ties.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from specdecode_kernels.cpu.native import library
from specdecode_worker.commands.flags import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specdecode_worker.commands.local_engine import LocalEngine
from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, TreeShape, WorkerConfig
from specdecode_worker.core.messages import Submit
from specdecode_worker.models.fetch import default_cache_dir
from specdecode_worker.sampling.params import Sampling
from support.lossless.small_requests import plan_of
from support.tiers import skip_reason

pytestmark = [
    pytest.mark.embedded,
    pytest.mark.skipif(library() is None, reason=skip_reason("native", "nothing is compiled here")),
]

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts" / "heldout.jsonl"
COUNT, TOKENS = 10, 32
SHAPES = [TreeShape.parse(text) for text in ("chain:1", "chain:3", "chain:6", "tree:4,2,1", "tree:2,2,2")]


@pytest.fixture(scope="module")
def local() -> LocalEngine:
    config = WorkerConfig(
        model=ModelConfig(uri=EMBEDDED_TARGET, served_name="embedded", dtype="bfloat16", max_model_len=1024),
        draft=DraftConfig(method="eagle3", uri=EMBEDDED_DRAFT, required=True),
        engine=EngineConfig(max_num_seqs=8, device="cpu", threads=1, kv_cache_tokens=8 * 512),
    )
    return LocalEngine(config, default_cache_dir())


def requests(local: LocalEngine) -> list[Submit]:
    lines = [json.loads(text) for text in PROMPTS.read_text().splitlines()]
    submits = []
    for i in range(COUNT):
        sampling = Sampling(max_tokens=TOKENS, seed=i, temperature=(0.0, 0.8)[i % 2], ignore_eos=True)
        prompt = local.prompt(lines[7 * i % len(lines)]).tokens
        submits.append(Submit(request_id=str(i), prompt=prompt, sampling=sampling, task=f"t{i % len(SHAPES)}"))
    return submits


def texts(local: LocalEngine, submits: Sequence[Submit], *, at_once: int) -> tuple[list[list[int]], int]:
    """Return the tokens of every request, run ``at_once`` at a time, and the number of drafted tokens."""
    tokens_by_request: dict[str, list[int]] = {submit.request_id: [] for submit in submits}
    accepted = 0
    for begin in range(0, len(submits), at_once):
        for submit in submits[begin : begin + at_once]:
            local.engine.add(submit)
        while not local.engine.idle:
            for new in local.engine.step():
                tokens_by_request[new.request_id] += new.tokens
                accepted += new.accepted if new.finish else 0
    return list(tokens_by_request.values()), accepted


def test_bf16_texts_do_not_diverge(local: LocalEngine) -> None:
    submits = requests(local)
    local.run_shape(TreeShape(()))
    alone, none = texts(local, submits, at_once=1)
    together, _ = texts(local, submits, at_once=8)
    version = local.engine.report().plan.version + 1
    local.engine.set_plan(plan_of(SHAPES, draft=local.engine.draft.hash, version=version))
    drafted, accepted = texts(local, submits, at_once=8)
    assert none == 0 < COUNT < accepted, "drafts must have been right, or nothing is tested"
    assert together == alone
    assert drafted == alone
