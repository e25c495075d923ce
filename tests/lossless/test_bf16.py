"""bf16 on a CPU with compiled blocks: a row's logits do not depend on the batch, bit for bit.

Every row is computed separately, so texts are compared exactly, without an exception for near ties.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specdecode_kernels.cpu.native import library
from specdecode_worker.commands.local_engine import LocalEngine
from specdecode_worker.contract import TreeShape
from specdecode_worker.core.messages import Submit, Tokens
from specdecode_worker.sampling.params import Sampling
from support.lossless.embedded import embedded_engine, heldout_prompts
from support.lossless.small_requests import plan_of
from support.small_llama import emitted
from support.tiers import skip_reason

pytestmark = [
    pytest.mark.embedded,
    pytest.mark.skipif(library() is None, reason=skip_reason("native", "nothing is compiled here")),
]

COUNT, TOKENS = 10, 32
SHAPES = [TreeShape.parse(text) for text in ("chain:1", "chain:3", "chain:6", "tree:4,2,1", "tree:2,2,2")]


@pytest.fixture(scope="module")
def local() -> LocalEngine:
    return embedded_engine(dtype="bfloat16", max_model_len=1024, max_num_seqs=8, threads=1, kv_cache_tokens=8 * 512)


def requests(local: LocalEngine) -> list[Submit]:
    lines = heldout_prompts()
    submits = []
    for i in range(COUNT):
        sampling = Sampling(max_tokens=TOKENS, seed=i, temperature=(0.0, 0.8)[i % 2], ignore_eos=True)
        prompt = local.prompt(lines[7 * i % len(lines)]).tokens
        submits.append(Submit(request_id=str(i), prompt=prompt, sampling=sampling, task=f"t{i % len(SHAPES)}"))
    return submits


def texts(local: LocalEngine, submits: Sequence[Submit], *, at_once: int) -> tuple[list[list[int]], int]:
    """Return the tokens of every request, run ``at_once`` at a time, and the number of drafted tokens."""
    answers: list[list[Tokens]] = []
    for begin in range(0, len(submits), at_once):
        answers += emitted(local.engine, submits[begin : begin + at_once]).values()
    tokens = [[token for new in answer for token in new.tokens] for answer in answers]
    return tokens, sum(answer[-1].accepted for answer in answers)


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
