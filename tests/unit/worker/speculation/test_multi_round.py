"""Tests of the multi-round sampler: draws, stored proposals, and batches of greedy and sampled requests."""

from __future__ import annotations

import torch
from msgspec.structs import replace
from scipy.stats import chisquare
from torch import Tensor

from specdecode_worker.contract import TreeShape
from specdecode_worker.sampling.params import SamplingParams
from specdecode_worker.sampling.sampler import BatchTokens, StepSampler, sampler_of
from specdecode_worker.sampling.trees import Forest, Nodes, forest_of, tree_of

V, CPU = 7, torch.device("cpu")
TREE = tree_of(TreeShape.levels(3, 1))
FREE = SamplingParams(max_tokens=1, seed=0, temperature=1.0, top_k=0, top_p=1.0)
GREEDY = replace(FREE, temperature=0.0)


def sampler(batch_params: list[SamplingParams], trees: Forest, *, coupled: bool = False) -> StepSampler:
    batch = len(batch_params) + 1
    texts = BatchTokens(torch.zeros(batch, 20, dtype=torch.int64), torch.arange(batch), torch.full((batch,), 4))
    return sampler_of(batch_params, texts, trees, V, longest=5, coupled=coupled)


def verified(
    made: StepSampler, trees: Forest, tokens_BN: Tensor, logits_RV: Tensor, nodes: int
) -> tuple[Tensor, Tensor]:
    """Return the tokens that are accepted, and the token behind every accepted node and root, both [B, N]."""
    batch, depths = len(tokens_BN), torch.tensor(trees.trees[0].depths)
    at = Nodes(torch.arange(batch).repeat_interleave(nodes), torch.arange(nodes).repeat(batch), depths.repeat(batch))
    starts = nodes * torch.arange(batch + 1)
    found = made.verified(made.at(at), tokens_BN.flatten(), logits_RV, starts, trees.parents_BN, trees.depth)
    return found[0].view(batch, nodes), found[1].view(batch, nodes)


def forest(batch: int) -> Forest:
    return forest_of((TREE,) * batch, CPU)


def logits(rows: int, seed: int = 0) -> Tensor:
    return 1.5 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def roots(batch: int) -> Nodes:
    none = torch.zeros(batch, dtype=torch.int64)
    return Nodes(torch.arange(batch), none, none)


def test_siblings_are_drawn_without_replacement() -> None:
    """The first child follows the draft's distribution, the second that distribution without the first child."""
    batch = 4000
    batch_params = [replace(FREE, seed=seed) for seed in range(batch)]
    q = torch.softmax(logits(1)[0], -1)
    trees = Forest((TREE,) * batch, (), torch.full((batch, 1), -1), 0, all_chains=False)
    proposals = sampler(batch_params, trees).propose(logits(1).expand(batch, -1), None, roots(batch), 3.0, 3)
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
    both = [sampler(batch_params, forest(3), coupled=coupled) for coupled in (False, True)]
    proposed = [s.propose(logits(3), None, roots(3), 1.0, 4) for s in both]
    assert torch.equal(proposed[0][:2], proposed[1][:2])
    tokens = torch.randint(0, V, (3, 7), generator=torch.Generator().manual_seed(2))
    found = [verified(s, forest(3), tokens, logits(21), 7)[1] for s in both]
    emitted_BN = found[0][:2]
    on_path = emitted_BN >= 0
    assert on_path[:, 0].all()
    assert torch.equal(emitted_BN[on_path], found[1][:2][on_path])
    alone = sampler(batch_params[:2], forest(2))
    assert torch.equal(verified(alone, forest(2), tokens[:2], logits(21)[:14], 7)[1], found[1][:2])


def test_certain_tokens_and_a_perfect_draft_are_always_accepted() -> None:
    """If p equals q, the first child is accepted with probability p/q = 1."""
    batch = 200
    batch_params = [replace(FREE, seed=seed) for seed in range(batch)]
    chain = forest_of((tree_of(TreeShape.chain(1)),) * batch, CPU)
    made = sampler(batch_params, chain)
    proposed = made.propose(logits(batch), None, roots(batch), 1.0, 1)
    tokens = torch.cat((torch.zeros(batch, 1, dtype=torch.int64), proposed), dim=1)
    behind = torch.stack((logits(batch), logits(batch, 1)), dim=1).flatten(0, 1)
    accepted_BN, emitted_BN = verified(made, chain, tokens, behind, 2)
    assert torch.equal(accepted_BN[:, 1], proposed[:, 0])
    assert torch.equal(emitted_BN[:, 0], proposed[:, 0])
    unasked = verified(sampler(batch_params, chain), chain, tokens, behind, 2)[0]
    assert (unasked[:, 1] == proposed[:, 0]).sum() < batch, "a point mass is not that law"


def test_draft_with_a_smaller_vocabulary_is_verified_by_target_ids() -> None:
    ids = torch.tensor([1, 4, 6])
    batch_params = [replace(FREE, seed=seed) for seed in range(50)]
    made = sampler(batch_params, forest(50))
    proposed = made.propose(logits(50)[:, :3], ids, roots(50), 1.0, 3)
    assert sorted(set(proposed.flatten().tolist())) == ids.tolist()
    assert torch.equal(torch.isfinite(made._logq_BNV[:50, 0]).sum(0).nonzero()[:, 0], ids)
    assert made._drawn_BN[:50].sum(0).tolist() == [50, 0, 0, 0, 0, 0, 0]
