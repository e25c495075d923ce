"""Every proposal of a parallel draft in the engine is that of its definition, computed in one dense pass.

A wrong proposal does not change the text, and a random head is accepted so rarely that acceptance does not show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_worker.contract import TreeShape
from specdecode_worker.drafts.parallel import DFlashDrafter
from specdecode_worker.drafts.registry import Proposals
from specdecode_worker.engine.engine import Engine
from specdecode_worker.models.dflash import DFlashHead
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.sampling.trees import Forest
from support.lossless.small_requests import plan_of, submit
from support.small_llama import texts
from support.worker.dense_attention import dense

SHAPES = [TreeShape.parse(text) for text in ("chain:5", "none", "chain:1", "tree:3,2,1", "chain:3")]


class CheckedProposals:
    """Drafter of an engine whose every proposal for a greedy request is compared with a dense pass."""

    def __init__(self, engine: Engine, pair: Any) -> None:
        self._drafter = engine._drafts._drafts[""].drafter
        self._propose, self._state, self._pair = engine._drafts.proposals.propose, engine._state, pair
        engine._drafts.proposals.propose = self.propose  # type: ignore[method-assign]
        self.depths: list[int] = []
        """Depth of each drafted tree that was compared."""

    def propose(self, rows: Sequence[Any], forest: Forest, sampler: Any) -> Proposals:
        """Propose as the drafter does, and compare the best tokens behind every node."""
        texts = [self._text(row.request) for row in rows]
        started = [row.request.draft.start <= 1 for row in rows]
        proposed = self._propose(rows, forest, sampler)
        ranked_BNK = proposed.ranked_BNK
        for b, (row, tree) in enumerate(zip(rows, forest.trees, strict=True)):
            if tree.drafted_depth and row.request.sampling_params.greedy and started[b]:
                assert ranked_BNK is not None
                wanted = self._ranked(texts[b], tree.drafted_depth)
                for depth, nodes in enumerate(tree.expanded):
                    for node in nodes:
                        assert ranked_BNK[b, node, :3].tolist() == wanted[depth], (len(texts[b]), depth, node)
                self.depths.append(tree.drafted_depth)
        return proposed

    def _text(self, request: Any) -> Tensor:
        """Return the tokens of the request, the root included."""
        return self._state.tokens_SP[request.slot, : int(self._state.length_S[request.slot]) + 1].clone()

    def _ranked(self, tokens: Tensor, depth: int) -> list[list[int]]:
        """Return the three best tokens by depth behind the last of ``tokens``."""
        if isinstance(self._drafter, DFlashDrafter):
            return self._ranked_block(tokens, depth)
        head, masks = self._pair.peagle, depth - 1
        states = self._pair.target(tokens, torch.arange(len(tokens)), dense, TargetStates(head.config.aux_layers))
        read = torch.cat((states.aux_TA[:-1], head.mask_hidden.flatten().expand(masks, -1)))
        text = torch.cat((tokens[1:], torch.full((masks,), head.config.mask_token_id)))
        hidden = head(head.fuse(read), text, torch.arange(1, len(text) + 1), dense)
        best = head.logits(hidden[-depth:]).topk(3).indices
        return head.target_ids[best].tolist()  # type: ignore[no-any-return]

    def _ranked_block(self, tokens: Tensor, depth: int) -> list[list[int]]:
        head, root = self._pair.dflash, len(tokens) - 1
        states = self._pair.target(tokens, torch.arange(root + 1), dense, TargetStates(head.config.aux_layers))
        context = head.context(states.aux_TA[:-1], torch.arange(root))
        text = torch.cat((tokens[-1:], torch.full((depth,), head.config.mask_token_id)))

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            k, v = (torch.cat(pair) for pair in zip(context[layer], (k_TKD, v_TKD), strict=True))
            q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k, v))
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)

        hidden = head(text, torch.arange(root, root + depth + 1), attend)
        best = head.logits(hidden[1:]).topk(3).indices
        return (best if head.target_ids is None else head.target_ids[best]).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("method", "passes"), [("eagle3", 5), ("peagle", 1)])
def test_a_chain_of_five_runs_the_head_once(
    make_engine: Any, pair: Any, method: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step reads the weights of the head and of its output matrix once, and those of an EAGLE-3 head five times."""
    head = pair.eagle if method == "eagle3" else pair.peagle
    calls = {"forward": 0, "logits": 0}

    def counted(name: str) -> Any:
        run = getattr(head, name)

        def call(*args: Any) -> Any:
            calls[name] += 1
            return run(*args)

        return call

    for name in calls:
        monkeypatch.setattr(head, name, counted(name))
    engine = make_engine(method, max_num_seqs=1, plan=plan_of([TreeShape.chain(5)]))
    texts(engine, [submit(4, sampled=False, tokens=30)])
    steps = sum(cell.count for cell in engine.report().steps if cell.draft_passes)
    assert steps > 10
    assert calls == {"forward": passes * steps + 1, "logits": passes * steps}, "one more pass runs over the prompt"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pipelined": True},
        {"max_num_seqs": 5, "blocks": 12, "budget": 40},
        {"max_num_seqs": 5, "blocks": 12, "budget": 40, "pipelined": True},
        {"prefix_caching": False, "budget": 16},
    ],
    ids=["in-turn", "pipelined", "few-blocks", "few-blocks-pipelined", "small-chunks"],
)
@pytest.mark.parametrize("method", ["peagle", "dflash"])
def test_proposals_equal_a_dense_pass(make_engine: Any, pair: Any, method: str, fields: dict[str, Any]) -> None:
    engine = make_engine(method, **fields, plan=plan_of(SHAPES))
    checked = CheckedProposals(engine, pair)
    requests = [submit(i, sampled=i % 4 == 3, tokens=24, shapes=len(SHAPES)) for i in range(10)]
    texts(engine, requests)
    assert len(checked.depths) > 50
    assert set(checked.depths) == {1, 3, 5}
    assert engine.report().preemptions > 0 or "blocks" not in fields


class TestOwnVocabulary:
    """A DFlash head with embeddings and an output matrix of its own, over some of the target's tokens."""

    @pytest.fixture
    def pair(self, pair: Any) -> Any:
        """Return the pair with such a head, which has the same layers."""
        config = replace(pair.dflash.config, draft_vocab_size=30)
        head = DFlashHead(config, pair.target, own_embedding=True, own_lm_head=True).double().requires_grad_(False)
        for matrix in (head.embed_tokens, head.lm_head):
            assert matrix is not None
            torch.nn.init.normal_(matrix.weight, std=0.35, generator=torch.Generator().manual_seed(2))
        head.load_state_dict(pair.dflash.state_dict(), strict=False)
        assert head.d2t is not None
        head.d2t += torch.arange(30)  # maps to target ids 0, 2, 4, ...
        return replace(pair, dflash=head)

    @pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
    def test_text_and_proposals(self, make_engine: Any, plain: Any, pair: Any, sampled: bool) -> None:
        engine = make_engine("dflash", plan=plan_of(SHAPES))
        checked = CheckedProposals(engine, pair)
        requests = [submit(i, sampled=sampled and i % 2 == 1, tokens=24, shapes=len(SHAPES)) for i in range(10)]
        assert texts(engine, requests) == plain(requests)
        assert set(checked.depths) == {1, 3, 5}
        report = engine.report()
        assert report.accepted_tokens > 0
