"""Speculative text equals plain text, token for token: greedy and sampled, chains and trees, alone and in a batch.

Plain text is computed without engine, cache or packing: one dense pass over all tokens for every next token.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdecode_worker.contract import MAX_RANKS, Plan, SyntheticKnobs, TreeShape
from specdecode_worker.core.messages import Submit
from support.lossless.plain_decoding import PlainDecoding, noised
from support.lossless.small_requests import plan_of, submit
from support.small_llama import texts
from support.worker.dense_attention import dense

pytestmark = pytest.mark.core

CHAINS = [TreeShape.chain(depth) for depth in range(1, 7)]
TREES = [TreeShape.parse(text) for text in ("tree:4,2,1", "tree:2,2,2", "tree:8", "tree:3,1,1,1", "0,0,0,1,1,2,4,4,6")]
TOKENS = 40


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [TreeShape(()), *CHAINS, *TREES], ids=str)
def test_single_sequences_equal_plain_decoding(
    make_engine: Any, reference: PlainDecoding, shape: TreeShape, sampled: bool
) -> None:
    engine = make_engine("copy", max_num_seqs=1, plan=plan_of([shape]))
    requests = [submit(i, sampled=sampled, tokens=TOKENS) for i in range(4)]
    for request in requests:
        assert texts(engine, [request]) == reference.texts([request])
    if shape.nodes:
        report = engine.report()
        assert 1 + report.accepted_tokens / report.drafts >= 1.5, "the draft must be good enough to test anything"


MIXES = {
    "plain-too": [TreeShape(()), CHAINS[0], CHAINS[2], CHAINS[5], *TREES[:4]],
    "all-draft": [CHAINS[1], TREES[4], CHAINS[3], CHAINS[4], TREES[2], TREES[0], CHAINS[5], TREES[3]],
}


@pytest.mark.parametrize("draft", ["copy", "eagle3", "peagle"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mix", MIXES)
def test_batch_of_mixed_shapes_equals_plain_decoding(
    make_engine: Any, reference: PlainDecoding, mix: str, sampled: bool, draft: str
) -> None:
    engine = make_engine(draft, plan=plan_of(MIXES[mix]))
    requests = [submit(i, sampled=sampled or i % 2 == 1, tokens=TOKENS, shapes=8) for i in range(8)]
    assert texts(engine, requests) == reference.texts(requests)
    report = engine.report()
    assert 1 + report.accepted_tokens / report.drafts >= (1.5 if draft == "copy" else 1.01)


def _ranks(pair: Any, request: Submit, text: list[int]) -> list[int]:
    """Return the rank that the draft gives every token of the text, computed in one dense pass.

    This draft has no slot 0 and reads tokens only.
    """
    tokens = torch.tensor([*request.prompt, *text])
    slots = torch.arange(1, len(tokens) - 1)
    logits = pair.copy.llama.logits(pair.copy.llama(tokens[slots], slots, dense).hidden_TE)
    scores = noised(logits, request.sampling, slots + 1)
    ranks = (scores > scores.gather(1, tokens[slots + 1, None])).sum(-1).tolist()
    return ranks[len(request.prompt) - 1 :]  # starts after the first emitted token


def _steps(shape: TreeShape, ranks: list[int], tokens: int) -> tuple[int, int]:
    """Return (drafts, accepted) of a request that runs ``shape`` in every step.

    Prefill emits the first token.
    """
    drafts = accepted = at = 0
    while at + 1 < tokens:
        node, path = 0, 0
        while (rank := ranks[at + path]) < len(children := list(shape.children(node))):
            node, path = children[rank], path + 1
        drafts, accepted, at = drafts + 1, accepted + path, at + path + 1
    return drafts, accepted


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [CHAINS[0], CHAINS[5], *TREES], ids=str)
def test_drafts_match_one_dense_pass(
    make_engine: Any, pair: Any, reference: PlainDecoding, shape: TreeShape, sampled: bool
) -> None:
    """A draft that runs at a wrong position or over wrong keys changes no text: it only lowers the acceptance rate."""
    # Top-p and top-k leave draft and target with tokens of probability zero, in arbitrary order.
    requests = [submit(i, sampled=sampled, tokens=TOKENS) for i in range(1, 17) if i % 4 == 0 or not sampled]
    engine = make_engine("copy", plan=plan_of([shape]))
    texts(engine, requests)
    wanted = [0, 0]
    for request in requests:
        longer = submit(int(request.request_id), sampled=sampled, tokens=TOKENS + MAX_RANKS)
        counts = _steps(shape, _ranks(pair, request, reference.text(longer)), TOKENS)
        wanted = [a + b for a, b in zip(wanted, counts, strict=True)]
    report = engine.report()
    assert [report.drafts, report.accepted_tokens] == wanted


@pytest.mark.parametrize("graphs", [(), (1, 2, 4, 8)], ids=["eager", "graphs"])
def test_knobs_guard_and_exploration_do_not_change_the_text(
    make_engine: Any, reference: PlainDecoding, graphs: tuple[int, ...]
) -> None:
    engine = make_engine("copy", graphs=graphs, plan=plan_of([CHAINS[3]], guard=True, explore=0.5, max_depth=6))
    engine.set_synthetic(SyntheticKnobs(acceptance=(0.8, 0.5)))
    requests = [submit(i, sampled=i % 2 == 0, tokens=TOKENS) for i in range(8)]
    assert texts(engine, requests) == reference.texts(requests)
    assert not graphs or engine._graphs.replayed > 0


def test_plan_switched_midway(make_engine: Any, reference: PlainDecoding) -> None:
    """Speculation stays off long enough for the ring of hidden states to be overwritten."""
    engine = make_engine("copy")
    requests = [submit(i, sampled=i % 2 == 0, tokens=200) for i in range(3)]

    def switch(steps: int) -> None:
        if steps in (0, 100):
            engine.set_plan(plan_of([CHAINS[2]], version=2) if steps else Plan(draft="d", version=1))

    assert texts(engine, requests, switch) == reference.texts(requests)
    assert engine.report().drafts > 0
