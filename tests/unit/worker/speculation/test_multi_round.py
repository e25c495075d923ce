"""Tests of the multi-round sampler: draws, stored proposals, and batches of greedy and sampled requests."""

from __future__ import annotations

from dataclasses import replace

import torch
from scipy.stats import chisquare
from torch import Tensor

from specdecode_worker.contract import TreeShape
from specdecode_worker.sampling.columns import BatchTokens
from specdecode_worker.sampling.coupling import Coupling
from specdecode_worker.sampling.params import SamplingParams
from specdecode_worker.sampling.sampler import MultiRound
from specdecode_worker.sampling.trees import Forest, forest_of, tree_of

V, CPU = 7, torch.device("cpu")
TREE = tree_of(TreeShape.levels(3, 1))
FREE = SamplingParams(seed=0, temperature=1.0, top_k=0, top_p=1.0)
GREEDY = replace(FREE, temperature=0.0)


def texts(batch: int) -> BatchTokens:
    return BatchTokens(torch.zeros(batch, 20, dtype=torch.int64), torch.arange(batch), torch.full((batch,), 4), 5)


def forest(batch: int) -> Forest:
    return forest_of((TREE,) * batch, CPU)


def logits(rows: int, seed: int = 0) -> Tensor:
    return 1.5 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def roots(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    none = torch.zeros(batch, dtype=torch.int64)
    return torch.arange(batch), none, none


def test_siblings_are_drawn_without_replacement() -> None:
    """The first child follows the draft's distribution, the second that distribution without the first child."""
    batch = 4000
    batch_params = [replace(FREE, seed=seed) for seed in range(batch)]
    q = torch.softmax(logits(1)[0], -1)
    trees = Forest((TREE,) * batch, (), torch.full((batch, 1), -1), 0, all_chains=False)
    sampler = MultiRound(batch_params, texts(batch), trees, V)
    proposals = sampler.propose(logits(1).expand(batch, -1), None, *roots(batch), 3.0, 3)
    assert all(len(set(row)) == 3 for row in proposals.tolist())
    assert chisquare(torch.bincount(proposals[:, 0], minlength=V), (q * batch)).pvalue > 1e-3
    best = int(q.argmax())
    second = torch.bincount(proposals[proposals[:, 0] == best, 1], minlength=V)
    rest = q.clone()
    rest[best] = 0
    other_tokens = [token for token in range(V) if token != best]
    assert chisquare(second[other_tokens], rest[other_tokens] / rest.sum() * second.sum()).pvalue > 1e-3


def test_greedy_requests_behave_as_under_coupling() -> None:
    batch_params = [GREEDY, replace(GREEDY, logit_bias=((3, 2.0),)), FREE]
    mss = MultiRound(batch_params, texts(3), forest(3), V)
    coupled = Coupling(batch_params, texts(3), forest(3), V)
    proposed = [s.propose(logits(3), None, *roots(3), 1.0, 4) for s in (mss, coupled)]
    assert torch.equal(proposed[0][:2], proposed[1][:2])
    at = torch.arange(3).repeat_interleave(7), torch.arange(7).repeat(3), torch.tensor(TREE.depths).repeat(3)
    tokens = torch.randint(0, V, (3, 7), generator=torch.Generator().manual_seed(2))
    outcomes = [s.accept(forest(3), tokens, logits(21), *at, None, None) for s in (mss, coupled)]
    assert torch.equal(outcomes[0].emitted_BD[:2], outcomes[1].emitted_BD[:2])
    assert torch.equal(outcomes[0].path_BD[:2], outcomes[1].path_BD[:2])
    alone = MultiRound(batch_params[:2], texts(2), forest(2), V)
    rows = at[0] < 2
    only = alone.accept(forest(2), tokens[:2], logits(21)[rows], *(column[rows] for column in at), None, None)
    assert torch.equal(only.emitted_BD, outcomes[1].emitted_BD[:2])


def test_certain_tokens_and_a_perfect_draft_are_always_accepted() -> None:
    """If p equals q, the first child is accepted with probability p/q = 1."""
    batch = 200
    batch_params = [replace(FREE, seed=seed) for seed in range(batch)]
    chain = forest_of((tree_of(TreeShape.chain(1)),) * batch, CPU)
    sampler = MultiRound(batch_params, texts(batch), chain, V)
    proposed = sampler.propose(logits(batch), None, *roots(batch), 1.0, 1)
    tokens = torch.cat((torch.zeros(batch, 1, dtype=torch.int64), proposed), dim=1)
    at = torch.arange(batch).repeat_interleave(2), torch.arange(2).repeat(batch), torch.arange(2).repeat(batch)
    behind = torch.stack((logits(batch), logits(batch, 1)), dim=1).flatten(0, 1)
    outcome = sampler.accept(chain, tokens, behind, *at, None, None)
    assert outcome.count_B.tolist() == [1] * batch
    assert torch.equal(outcome.emitted_BD[:, 0], proposed[:, 0])
    unasked = MultiRound(batch_params, texts(batch), chain, V)
    assert unasked.accept(chain, tokens, behind, *at, None, None).count_B.sum() < batch, "a point mass is not that law"


def test_draft_with_a_smaller_vocabulary_is_verified_by_target_ids() -> None:
    ids = torch.tensor([1, 4, 6])
    batch_params = [replace(FREE, seed=seed) for seed in range(50)]
    sampler = MultiRound(batch_params, texts(50), forest(50), V)
    proposed = sampler.propose(logits(50)[:, :3], ids, *roots(50), 1.0, 3)
    assert sorted(set(proposed.flatten().tolist())) == ids.tolist()
    logq_BNV, drawn_BN = sampler._proposed(forest(50), torch.zeros(50, 7, V, dtype=torch.float64))
    assert logq_BNV is not None
    assert drawn_BN is not None
    assert torch.equal(torch.isfinite(logq_BNV[:, 0]).sum(0).nonzero()[:, 0], ids)
    assert drawn_BN.sum(0).tolist() == [50, 0, 0, 0, 0, 0, 0]
