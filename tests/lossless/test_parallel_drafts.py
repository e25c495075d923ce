"""Proposals of the drafts in the engine are those of their definitions, computed in one dense pass.

All tokens of parallel drafts are compared, and of the others those behind the root.

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
    """Drafter of an engine whose proposals for greedy requests are compared with a dense pass."""

    def __init__(self, engine: Engine, pair: Any, method: str) -> None:
        self._propose, self._state = engine._drafts.proposals.propose, engine._state
        self._pair, self._method = pair, method
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
                for depth, (nodes, best) in enumerate(zip(tree.expanded, wanted, strict=False)):
                    for node in nodes:
                        assert ranked_BNK[b, node, :3].tolist() == best, (len(texts[b]), depth, node)
                self.depths.append(tree.drafted_depth)
        return proposed

    def _text(self, request: Any) -> Tensor:
        """Return the tokens of the request, the root included."""
        return self._state.tokens_SP[request.slot, : int(self._state.length_S[request.slot]) + 1].clone()

    def _ranked(self, tokens: Tensor, depth: int) -> list[list[int]]:
        """Return the three best tokens by depth behind the last of ``tokens``, but for those behind a proposal."""
        pair, slots = self._pair, torch.arange(1, len(tokens))
        head: Any
        match self._method:
            case "eagle3":
                head, aux_TA = pair.eagle, self._states(tokens, pair.eagle.config.aux_layers).aux_TA
                hidden = head(head.fuse(aux_TA[:-1]), tokens[1:], slots, dense)[-1:]
            case "eagle":
                head = pair.eagle1
                hidden = head(self._states(tokens).hidden_TE[:-1], tokens[1:], slots, dense)[-1:]
            case "draft-model":
                head = pair.copy.llama
                hidden = head(tokens, torch.arange(len(tokens)), dense).hidden_TE[-1:]
            case "medusa":
                logits = pair.medusa.logits(self._states(tokens).hidden_TE[-2:-1])
                return logits[:, 0].topk(3).indices.tolist()  # type: ignore[no-any-return]
            case "peagle":
                head, masks = pair.peagle, depth - 1
                aux_TA = self._states(tokens, head.config.aux_layers).aux_TA
                read = torch.cat((aux_TA[:-1], head.mask_hidden.flatten().expand(masks, -1)))
                text = torch.cat((tokens[1:], torch.full((masks,), head.config.mask_token_id)))
                hidden = head(head.fuse(read), text, torch.arange(1, len(text) + 1), dense)[-depth:]
            case "dflash":
                head, hidden = pair.dflash, self._hidden_of_block(tokens, depth)
        best, ids = head.logits(hidden).topk(3).indices, getattr(head, "target_ids", None)
        return (best if ids is None else ids[best]).tolist()  # type: ignore[no-any-return]

    def _states(self, tokens: Tensor, layers: tuple[int, ...] = ()) -> Any:
        return self._pair.target(tokens, torch.arange(len(tokens)), dense, TargetStates(layers))

    def _hidden_of_block(self, tokens: Tensor, depth: int) -> Tensor:
        head, root = self._pair.dflash, len(tokens) - 1
        context = head.context(self._states(tokens, head.config.aux_layers).aux_TA[:-1], torch.arange(root))
        text = torch.cat((tokens[-1:], torch.full((depth,), head.config.mask_token_id)))

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            k, v = (torch.cat(pair) for pair in zip(context[layer], (k_TKD, v_TKD), strict=True))
            q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k, v))
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)

        hidden: Tensor = head(text, torch.arange(root, root + depth + 1), attend)
        return hidden[1:]


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
@pytest.mark.parametrize("method", ["eagle3", "eagle", "draft-model", "medusa", "peagle", "dflash"])
def test_proposals_equal_a_dense_pass(make_engine: Any, pair: Any, method: str, fields: dict[str, Any]) -> None:
    engine = make_engine(method, **fields, plan=plan_of(SHAPES))
    checked = CheckedProposals(engine, pair, method)
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
        checked = CheckedProposals(engine, pair, "dflash")
        requests = [submit(i, sampled=sampled and i % 2 == 1, tokens=24, shapes=len(SHAPES)) for i in range(10)]
        assert texts(engine, requests) == plain(requests)
        assert set(checked.depths) == {1, 3, 5}
        report = engine.report()
        assert report.accepted_tokens > 0
