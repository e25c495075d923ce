"""Tests of coupled sampling.

A choice depends on the request's own sampling parameters, position and logits, and not on other requests.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_worker.sampling.params import SamplingParams
from specdecode_worker.sampling.sampler import BatchTokens, StepSampler, sampler_of
from specdecode_worker.sampling.trees import PLAIN, Nodes, forest_of

V = 23
GREEDY = SamplingParams(max_tokens=1, seed=1, temperature=0, top_k=0, top_p=1)
FREE = SamplingParams(max_tokens=1, seed=2, temperature=1.0, top_k=0, top_p=1)
WARM = SamplingParams(max_tokens=1, seed=3, temperature=1.7, top_k=0, top_p=1)
CUT = SamplingParams(max_tokens=1, seed=4, temperature=0.8, top_k=6, top_p=0.9)
MIXES = [[GREEDY], [FREE], [CUT], [GREEDY, FREE], [WARM, GREEDY, CUT, FREE], [FREE, WARM]]


def logits(rows: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def grid(batch: int, depth: int) -> tuple[Tensor, Tensor]:
    """Return the sequence and the depth of one row for every (sequence, depth)."""
    return torch.arange(batch).repeat_interleave(depth + 1), torch.arange(depth + 1).repeat(batch)


def coupling_of(batch_params: list[SamplingParams], roots: list[int], depth: int) -> StepSampler:
    """Build the sampler of a step with trees of ``depth``.

    None of the sampling parameters here depends on the texts or on the branches of the trees.
    """
    roots_B1 = torch.tensor([*roots, 0])
    tokens_SP = torch.zeros(len(roots_B1), max(roots) + depth + 2, dtype=torch.int64)
    texts = BatchTokens(tokens_SP, torch.arange(len(roots_B1)), roots_B1)
    forest = replace(forest_of((PLAIN,) * len(batch_params), torch.device("cpu")), depth=depth)
    return sampler_of(batch_params, texts, forest, V, longest=max(roots) + 1)


def choose(sampler: StepSampler, logits_RV: Tensor, batch_R: Tensor, node_R: Tensor, depth_R: Tensor) -> Tensor:
    return sampler.choose(sampler.at(Nodes(batch_R, node_R, depth_R)), logits_RV)


@pytest.mark.parametrize("params", [FREE, WARM, CUT])
def test_noise_depends_on_the_absolute_position(params: SamplingParams) -> None:
    """A node of depth 2 below root 5 and one of depth 0 below root 7 choose the token of the same position."""
    logits_RV = logits(60)
    none, two = torch.zeros(60).long(), torch.full((60,), 2)
    deep = choose(coupling_of([params], [5], 2), logits_RV, none, two, two)
    here = choose(coupling_of([params], [7], 0), logits_RV, none, none, none)
    previous = choose(coupling_of([params], [6], 0), logits_RV, none, none, none)
    assert torch.equal(deep, here)
    assert not torch.equal(here, previous), "another position has other noise"


@pytest.mark.parametrize("batch_params", MIXES, ids=len)
def test_draft_with_a_smaller_vocabulary_proposes_target_ids(batch_params: list[SamplingParams]) -> None:
    """Column i of the draft is the target's token ids[i]: its noise is read there, and proposals are target ids."""
    ids = torch.arange(0, V, 2)
    batch_R, depth_R = grid(len(batch_params), 30)
    coupling = coupling_of(batch_params, list(range(3, 3 + len(batch_params))), 30)
    narrow = logits(len(batch_R))[:, ids]
    wide = torch.full((len(batch_R), V), -1e9, dtype=torch.float64)
    wide[:, ids] = narrow
    untruncated = [params for params in batch_params if not params.truncated]
    proposals = coupling.propose(narrow, ids, Nodes(batch_R, depth_R, depth_R), 1.0, 4)
    assert set(proposals.flatten().tolist()) <= set(ids.tolist())
    if len(untruncated) == len(batch_params):
        assert torch.equal(proposals, coupling.propose(wide, None, Nodes(batch_R, depth_R, depth_R), 1.0, 4))


def test_sharpness_moves_sampled_proposals_towards_the_drafts_own_order() -> None:
    batch_R, depth_R = grid(1, 60)
    coupling = coupling_of([FREE], [3], 60)
    logits_RV = logits(61)
    sharp = coupling.propose(logits_RV, None, Nodes(batch_R, depth_R, depth_R), 1e6, 1)[:, 0]
    plain = coupling.propose(logits_RV, None, Nodes(batch_R, depth_R, depth_R), 1.0, 1)[:, 0]
    assert torch.equal(sharp, logits_RV.argmax(-1))
    assert not torch.equal(plain, sharp)


BIASED = [
    SamplingParams(max_tokens=1, seed=5, temperature=t, top_k=0, top_p=1, logit_bias=((3, 2.5), (7, -4.0), (11, 1.0)))
    for t in (0.0, 0.9)
]


@pytest.mark.parametrize("batch_params", [*MIXES, [*BIASED, FREE, GREEDY]], ids=len)
@pytest.mark.parametrize("mapped", [False, True], ids=["", "mapped"])
@pytest.mark.parametrize("sharpness", [1.0, 2.0])
def test_kernel_arguments_match_the_reference(
    batch_params: list[SamplingParams], mapped: bool, sharpness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments of the GPU kernels describe each row as the noise and logits processing of other devices do."""
    roots, depth = list(range(5, 5 + len(batch_params))), 3
    batch_R, depth_R = grid(len(batch_params), depth)
    ids_V = torch.arange(0, V, 2) if mapped else None
    logits_RV = logits(len(batch_R))
    drafted_RV = logits_RV if ids_V is None else logits(len(batch_R), 1)[:, : len(ids_V)]

    def propose_and_choose() -> tuple[Tensor, Tensor]:
        coupling = coupling_of(batch_params, roots, depth)
        proposed = coupling.propose(drafted_RV, ids_V, Nodes(batch_R, depth_R, depth_R), sharpness, 4)
        return proposed, choose(coupling, logits_RV, batch_R, depth_R, depth_R)

    wanted = propose_and_choose()
    monkeypatch.setattr(dispatch, "on_gpu", lambda _: True)  # On float64 input the operations run their references.
    for one, other in zip(propose_and_choose(), wanted, strict=True):
        assert torch.equal(one, other)
