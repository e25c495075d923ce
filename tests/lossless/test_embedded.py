"""The embedded model in fp32: speculative text equals plain text on 16 prompts (``make proofs P=lossless``: 200).

Both texts come from the engine that `bench` runs, in batches of eight with mixed shapes. In fp32 a pass over nine
rows rounds differently from a pass over one row. Where the scores of the two best tokens (with noise, if sampled) are
within 1e-4, texts may therefore diverge; this is counted. Any other difference fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specdecode_worker.commands.local_engine import Answer, LocalEngine, distinct_4grams
from specdecode_worker.contract import TreeShape
from specdecode_worker.core.messages import Submit
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.weights import load_causal_lm
from specdecode_worker.sampling.params import Sampling
from specdecode_worker.training.rollout import read_states
from support.lossless.embedded import embedded_engine, heldout_prompts
from support.lossless.plain_decoding import noised
from support.lossless.small_requests import plan_of
from support.small_llama import emitted
from support.tiers import by_effort

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(3600)]

COUNT = by_effort(quick=4, full=16, nightly=200)
BATCH, TOKENS = 8, 20
NEAR = 1e-4
SHAPES = [
    TreeShape.parse(text)
    for text in ("chain:1", "chain:3", "chain:6", "tree:4,2,1", "tree:2,2,2", "tree:8", "tree:3,1,1,1", "0,0,1,1,2,4,4")
]
SAMPLING_PARAMS = ((1.0, 1.0, 0), (0.7, 0.9, 40), (0.6, 1.0, 0))
"""Sampling parameters (temperature, top-p, top-k), rotated from batch to batch.

They do not share a batch, because one row with top-p or top-k slows down the whole batch.
"""


@pytest.fixture(scope="module")
def local() -> LocalEngine:
    threads = torch.get_num_threads()
    return embedded_engine(max_model_len=1024, max_num_seqs=BATCH, threads=threads, kv_cache_tokens=BATCH * 512)


@pytest.fixture(scope="module")
def reference_model(local: LocalEngine) -> CausalLM:
    """Return a second copy of the target as loaded, without engine, cache or fused matrices."""
    return load_causal_lm(local.folder, dtype=torch.float32, device=torch.device("cpu"))


def prompt_record(index: int) -> dict[str, Any]:
    """Return prompt ``index``.

    The first prompts cover all kinds. From the second round on, each question follows another question.
    """
    lines = heldout_prompts()
    round_, place = divmod(index, len(lines))
    messages: list[dict[str, str]] = list(lines[11 * place % len(lines)]["messages"])
    if round_:
        before = lines[(11 * place + 13 * round_) % len(lines)]["messages"][0]
        messages = [before, {"role": "assistant", "content": "Let us come back to that later."}, *messages]
    return {"messages": messages}


def requests(local: LocalEngine, *, sampled: bool) -> list[Submit]:
    """Return the requests. Task ``t<i>`` runs the i-th shape, and tasks are rotated from batch to batch."""
    submits = []
    for i in range(COUNT):
        temperature, top_p, top_k = SAMPLING_PARAMS[i // BATCH % len(SAMPLING_PARAMS)] if sampled else (0.0, 1.0, 0)
        sampling = Sampling(max_tokens=TOKENS, seed=500 + i, temperature=temperature, top_p=top_p, top_k=top_k)
        task = f"t{(i + i // BATCH) % len(SHAPES)}"
        submits.append(
            Submit(request_id=str(i), prompt=local.prompt(prompt_record(i)).tokens, sampling=sampling, task=task)
        )
    return submits


def answers(local: LocalEngine, submits: Sequence[Submit]) -> list[Answer]:
    """Return the answers of all requests, of which the scheduler runs eight at a time."""
    answers = []
    for parts in emitted(local.engine, submits).values():
        answers.append(Answer())
        for new in parts:
            answers[-1].take(new)
    return answers


def speculative(local: LocalEngine, submits: Sequence[Submit]) -> list[Answer]:
    local.run_shape(SHAPES[0])
    version = local.engine.report().plan.version + 1
    local.engine.set_plan(plan_of(SHAPES, draft=local.engine.draft.hash, version=version))
    return answers(local, submits)


def plain(local: LocalEngine, submits: Sequence[Submit]) -> list[Answer]:
    local.run_shape(TreeShape(()))
    return answers(local, submits)


@torch.inference_mode()
def scores(reference_model: CausalLM, submit: Submit, tokens: Sequence[int]) -> Tensor:
    """Return the scores that are compared at every position of the answer, [len(tokens) + 1, V].

    These are logits, or log-probabilities plus noise if the request is sampled.
    """
    read = [*submit.prompt, *tokens]
    _, hidden = read_states(reference_model, torch.tensor(read))
    logits = reference_model.logits(hidden[len(submit.prompt) - 1 :])
    return noised(logits, submit.sampling, torch.arange(len(submit.prompt), len(read) + 1))


def divergence(reference_model: CausalLM, submit: Submit, wanted: Sequence[int], actual: Sequence[int]) -> str | None:
    """Return None for equal texts, or a message if they diverge at a near tie. Fail on any other difference."""
    if list(wanted) == list(actual):
        return None
    at = next((i for i, (a, b) in enumerate(zip(wanted, actual, strict=False)) if a != b), None)
    assert at is not None, f"prompt {submit.request_id}: one text ends where the other goes on"
    best = scores(reference_model, submit, wanted[:at])[-1].topk(2)
    gap = float(best.values[0] - best.values[1])
    which = f"prompt {submit.request_id} ({submit.task}), token {at}: {wanted[at]} or {actual[at]}, {gap:.1e} apart"
    assert {wanted[at], actual[at]} == set(best.indices.tolist()), f"{which}: neither is a near tie's token"
    assert gap < NEAR, which
    return which


@pytest.mark.core
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_speculative_text_equals_plain_text(
    local: LocalEngine, reference_model: CausalLM, sampled: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    submits = requests(local, sampled=sampled)
    wanted, actual = plain(local, submits), speculative(local, submits)
    assert sum(a.drafts for a in wanted) == 0 < min(a.drafts for a in actual)
    pairs = [(a.tokens, b.tokens) for a, b in zip(wanted, actual, strict=True)]
    parted = [divergence(reference_model, one, *pair) for one, pair in zip(submits, pairs, strict=True)]
    near_ties = [where for where in parted if where]
    per_step = 1 + sum(a.accepted for a in actual) / sum(a.drafts for a in actual)
    with capsys.disabled():
        print(
            f"\n{len(submits)} texts, {sum(len(text) for text, _ in pairs)} tokens, {per_step:.2f} tokens/step, "
            f"{100 * distinct_4grams([text for _, text in pairs]):.0f} % distinct 4-grams, parted at a near tie:",
            *near_ties,
            sep="\n    ",
        )
    assert per_step > 1.2, "the draft must be good enough to test anything"
    assert len(near_ties) <= max(1, COUNT // 20), "near ties are rarer than that"


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_plain_text_matches_one_dense_pass(local: LocalEngine, reference_model: CausalLM, sampled: bool) -> None:
    """Every token of the plain text is the best one at its position, up to near ties.

    The check itself must distinguish a wrong token from a near tie.
    """
    submits = requests(local, sampled=sampled)[6:10]  # covers two sets of sampling parameters
    for submit, answer in zip(submits, plain(local, submits), strict=True):
        places = scores(reference_model, submit, answer.tokens)[:-1]
        best = places.max(-1).values - places.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert (best < NEAR).all()
        changed = [*answer.tokens[:-1], (answer.tokens[-1] + 1) % places.shape[-1]]
        with pytest.raises(AssertionError, match="apart"):
            divergence(reference_model, submit, answer.tokens, changed)
