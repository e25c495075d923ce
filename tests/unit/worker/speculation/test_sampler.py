"""Sampler of a step: coupled choices, logits processing along a tree, and masks at its nodes.

A choice depends on the request's own sampling parameters, position and logits, and not on other requests. Every node
uses the tokens on its own path, rows without adjustments are unchanged, and a draft with a smaller vocabulary is
processed like the target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.sample import reference
from specdecode_worker.contract import TreeShape
from specdecode_worker.sampling import sampler as module
from specdecode_worker.sampling.params import SamplingParams
from specdecode_worker.sampling.sampler import BatchTokens, SampledRows, StepSampler, TokenMasks, sampler_of
from specdecode_worker.sampling.trees import PLAIN, Nodes, Tree, ancestors_of, forest_of, given_chain, tree_of

V, CPU = 11, torch.device("cpu")
FREE = SamplingParams(max_tokens=1, seed=1, temperature=1.0, top_k=0, top_p=1.0)
SAMPLING_PARAMS = [
    FREE,
    replace(FREE, temperature=0.0),
    replace(FREE, temperature=0.0, presence_penalty=0.7),
    replace(FREE, frequency_penalty=-0.4, top_k=4),
    replace(FREE, repetition_penalty=1.6, min_p=0.1),
    replace(FREE, logit_bias=((2, 1.5), (7, -100.0)), temperature=0.0),
    replace(FREE, allowed_token_ids=(4, 7), repetition_penalty=1.6, temperature=0.0),
    replace(FREE, allowed_token_ids=(0, 1, 6), min_tokens=4, blocked=(1, 6), frequency_penalty=0.9),
    replace(FREE, min_tokens=4, blocked=(1, 6)),
    replace(FREE, min_tokens=2, blocked=(0,), presence_penalty=1.0, repetition_penalty=0.8, logit_bias=((3, 0.5),)),
]
SHAPES = [TreeShape.parse(text) for text in ("none", "chain:3", "tree:2,2", "0,0,1,2,2")]


class Case:
    """Sequences with their own prompts and answers, and a tree at the end of each."""

    def __init__(self, batch_params: list[SamplingParams], trees: list[Tree], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        batch = len(batch_params)
        prompts = torch.randint(1, 6, (batch,), generator=generator)
        answers = torch.randint(0, 7, (batch,), generator=generator)
        self.roots = prompts + answers - 1
        self.tokens = torch.randint(0, V, (batch, 30), generator=generator)
        self.slots = torch.randperm(batch, generator=generator)
        self.batch_params = [
            replace(params, prompt_tokens=int(n)) for params, n in zip(batch_params, prompts, strict=True)
        ]
        self.forest = forest_of(tuple(trees), CPU)
        places = [(b, n, tree.depths[n]) for b, tree in enumerate(trees) for n in range(tree.verified)]
        self.at = Nodes(*torch.tensor(places).unbind(1))
        self.logits = 2 * torch.randn(len(places), V, generator=generator, dtype=torch.float64)

    @property
    def texts(self) -> BatchTokens:
        slots_B1, roots_B1 = (torch.cat((column, column[:1])) for column in (self.slots, self.roots))
        return BatchTokens(self.tokens, slots_B1, roots_B1)

    @property
    def sampler(self) -> StepSampler:
        return sampler_of(self.batch_params, self.texts, self.forest, V, longest=int(self.roots.max()) + 1)

    def adjusted(self, ids_V: Tensor | None = None) -> Tensor:
        """Return the logits of all rows after adjustment, of some ids or of all."""
        sampler, logits_RV = self.sampler, self.logits if ids_V is None else self.logits[:, ids_V]
        return sampler._by_piece(sampler.at(self.at), logits_RV, ids_V, lambda _, moved_RV: moved_RV)

    def chosen(self) -> Tensor:
        sampler = self.sampler
        return sampler.choose(sampler.at(self.at), self.logits)

    def answer(self, row: int) -> list[int]:
        """Return the expected answer of a row: the answer up to the root, then the path in the tree."""
        b, node = int(self.at.batch_R[row]), int(self.at.node_R[row])
        said, root = self.tokens[self.slots[b]].tolist(), int(self.roots[b])
        path = []
        while node:
            path.append(said[root + node])
            node = self.forest.trees[b].parents[node]
        return said[self.batch_params[b].prompt_tokens : root + 1] + path[::-1]

    def wanted(self, row: int) -> Tensor:
        """Return the expected logits of a row."""
        params = self.batch_params[int(self.at.batch_R[row])]
        answer = self.answer(row)
        prompt = self.tokens[self.slots[self.at.batch_R[row]]].tolist()[: params.prompt_tokens]
        bias = torch.zeros(1, V)
        for token, value in params.logit_bias:
            bias[0, token] = value
        blocked = torch.zeros(1, V, dtype=torch.bool)
        blocked[0, list(params.blocked)] = len(answer) < params.min_tokens
        if params.allowed_token_ids:
            blocked[0, [token for token in range(V) if token not in params.allowed_token_ids]] = True
        return reference.adjusted(
            self.logits[row : row + 1],
            bias_RV=bias,
            blocked_RV=blocked,
            prompt_RV=torch.tensor([[token in prompt for token in range(V)]]),
            counts_RV=torch.tensor([[answer.count(token) for token in range(V)]]),
            repetition_R=torch.tensor([params.repetition_penalty]),
            frequency_R=torch.tensor([params.frequency_penalty]),
            presence_R=torch.tensor([params.presence_penalty]),
        )[0]


def sized(draw: st.DrawFn, items: list[Any], count: int) -> list[Any]:
    """Draw ``count`` items."""
    return draw(st.lists(st.sampled_from(items), min_size=count, max_size=count))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a batch of sequences with trees."""
    count = draw(st.integers(1, 5))
    trees = [tree_of(shape, draw(st.integers(0, 4))) for shape in sized(draw, SHAPES, count)]
    return Case(sized(draw, SAMPLING_PARAMS, count), trees, draw(st.integers(0, 999)))


@given(cases())
def test_every_node_counts_its_own_path(case: Case) -> None:
    assert torch.equal(case.adjusted(), torch.stack([case.wanted(row) for row in range(len(case.logits))]))


@given(cases())
def test_leaving_rows_out_changes_no_result(case: Case) -> None:
    """On a CPU the rows that adjust nothing are left out; on other devices they are adjusted by neutral values."""

    def results() -> tuple[Tensor, Tensor]:
        return case.chosen(), case.sampler.propose(case.logits, None, case.at, 1.3, 4)

    some, right = results(), module.StepSampler.__init__
    with pytest.MonkeyPatch.context() as patch:

        def all_rows(self: StepSampler, *args: Any, **fields: Any) -> None:
            right(self, *args, **{**fields, "adjusting": ()})

        patch.setattr(module.StepSampler, "__init__", all_rows)
        every = results()
    assert torch.equal(some[0], every[0])
    assert torch.equal(some[1], every[1])


@given(cases())
def test_a_perfect_draft_proposes_what_the_target_chooses(case: Case) -> None:
    proposed = case.sampler.propose(case.logits, None, case.at, 1.0, 3)
    assert torch.equal(proposed[:, 0], case.chosen())


@given(cases())
def test_draft_with_a_smaller_vocabulary_is_adjusted_by_target_ids(case: Case) -> None:
    ids = torch.arange(0, V, 2)
    assert torch.equal(case.adjusted(ids), case.adjusted()[:, ids])


@pytest.mark.parametrize("coupled", [True, False])
def test_a_draft_that_has_none_of_the_allowed_tokens(coupled: bool) -> None:
    """It proposes some of its tokens, which the target refuses."""
    case = Case([replace(FREE, allowed_token_ids=(4, 7))], [tree_of(TreeShape.parse("tree:2"))], 3)
    sampler = sampler_of(case.batch_params, case.texts, case.forest, V, longest=30, coupled=coupled)
    rows, ids = sampler.at(case.at), torch.tensor([0, 2, 6])
    proposed = sampler.proposed(rows[:1], case.logits[:1, ids], ids, 1.0, 2)[0].tolist()
    assert set(proposed) <= {0, 2, 6}
    tokens = torch.tensor([1, *proposed])
    _, chosen = sampler.verified(rows, tokens, case.logits, torch.tensor([0, 3]), case.forest.parents_BN, 1)
    assert int(chosen[0]) in (4, 7)


@given(cases(), st.sampled_from((torch.float32, torch.bfloat16)))
def test_a_choice_is_the_same_alone_and_in_a_batch(case: Case, dtype: torch.dtype) -> None:
    case.logits = case.logits.to(dtype)
    together = case.chosen()
    for b, params in enumerate(case.batch_params):
        rows = case.at.batch_R == b
        slots_B1, roots_B1 = (column[[b, b]] for column in (case.slots, case.roots))
        forest = forest_of((case.forest.trees[b],), CPU)
        texts = BatchTokens(case.tokens, slots_B1, roots_B1)
        alone = sampler_of([params], texts, forest, V, longest=int(case.roots[b]) + 1)
        own = Nodes(torch.zeros_like(case.at.batch_R[rows]), case.at.node_R[rows], case.at.depth_R[rows])
        assert torch.equal(alone.choose(alone.at(own), case.logits[rows]), together[rows])


def test_default_parameters_cost_no_processing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch with default greedy parameters takes the argmax of the given logits without copies, casts or counts."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("nobody asked for it")

    monkeypatch.setattr(module.op, "adjusted", never)
    monkeypatch.setattr(module, "count_tokens", never)
    case = Case([SAMPLING_PARAMS[1]] * 3, [tree_of(shape) for shape in SHAPES[:3]], 5)
    assert torch.equal(case.chosen(), case.logits.argmax(-1))
    assert case.adjusted() is case.logits


def test_only_rows_with_adjustments_are_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    right = module.op.adjusted
    monkeypatch.setattr(
        module.op, "adjusted", lambda logits, **rest: (seen.append(len(logits)), right(logits, **rest))[1]
    )
    case = Case(
        [SAMPLING_PARAMS[1], SAMPLING_PARAMS[2], SAMPLING_PARAMS[1]], [tree_of(shape) for shape in SHAPES[:3]], 5
    )
    case.adjusted()
    assert seen == [4]


def test_ancestors_are_the_nodes_on_the_path_to_a_node() -> None:
    tree = tree_of(TreeShape.parse("0,0,1,2,2"))
    assert tree.paths == ((), (1,), (2,), (1, 3), (2, 4), (2, 5))
    ancestors = ancestors_of((tree, tree_of(TreeShape.chain(1))), CPU)
    assert ancestors.tolist() == [[0b1, 0b11, 0b101, 0b1011, 0b10101, 0b100101], [0b1, 0b11, 0, 0, 0, 0]]


VOCABULARY = 23
GREEDY = SamplingParams(max_tokens=1, seed=1, temperature=0, top_k=0, top_p=1)
SAMPLED = SamplingParams(max_tokens=1, seed=2, temperature=1.0, top_k=0, top_p=1)
WARM = SamplingParams(max_tokens=1, seed=3, temperature=1.7, top_k=0, top_p=1)
CUT = SamplingParams(max_tokens=1, seed=4, temperature=0.8, top_k=6, top_p=0.9)
MIXES = [[GREEDY], [SAMPLED], [CUT], [GREEDY, SAMPLED], [WARM, GREEDY, CUT, SAMPLED], [SAMPLED, WARM]]


def logits(rows: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
    forest = dataclasses.replace(forest_of((PLAIN,) * len(batch_params), torch.device("cpu")), depth=depth)
    return sampler_of(batch_params, texts, forest, VOCABULARY, longest=max(roots) + 1)


def choose(sampler: StepSampler, logits_RV: Tensor, batch_R: Tensor, node_R: Tensor, depth_R: Tensor) -> Tensor:
    return sampler.choose(sampler.at(Nodes(batch_R, node_R, depth_R)), logits_RV)


@pytest.mark.parametrize("params", [SAMPLED, WARM, CUT])
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
    ids = torch.arange(0, VOCABULARY, 2)
    batch_R, depth_R = grid(len(batch_params), 30)
    coupling = coupling_of(batch_params, list(range(3, 3 + len(batch_params))), 30)
    narrow = logits(len(batch_R))[:, ids]
    wide = torch.full((len(batch_R), VOCABULARY), -1e9, dtype=torch.float64)
    wide[:, ids] = narrow
    untruncated = [params for params in batch_params if not params.truncated]
    proposals = coupling.propose(narrow, ids, Nodes(batch_R, depth_R, depth_R), 1.0, 4)
    assert set(proposals.flatten().tolist()) <= set(ids.tolist())
    if len(untruncated) == len(batch_params):
        assert torch.equal(proposals, coupling.propose(wide, None, Nodes(batch_R, depth_R, depth_R), 1.0, 4))


def test_sharpness_moves_sampled_proposals_towards_the_drafts_own_order() -> None:
    batch_R, depth_R = grid(1, 60)
    coupling = coupling_of([SAMPLED], [3], 60)
    logits_RV = logits(61)
    sharp = coupling.propose(logits_RV, None, Nodes(batch_R, depth_R, depth_R), 1e6, 1)[:, 0]
    plain = coupling.propose(logits_RV, None, Nodes(batch_R, depth_R, depth_R), 1.0, 1)[:, 0]
    assert torch.equal(sharp, logits_RV.argmax(-1))
    assert not torch.equal(plain, sharp)


BIASED = [
    SamplingParams(max_tokens=1, seed=5, temperature=t, top_k=0, top_p=1, logit_bias=((3, 2.5), (7, -4.0), (11, 1.0)))
    for t in (0.0, 0.9)
]


@pytest.mark.parametrize("batch_params", [*MIXES, [*BIASED, SAMPLED, GREEDY]], ids=len)
@pytest.mark.parametrize("mapped", [False, True], ids=["", "mapped"])
@pytest.mark.parametrize("sharpness", [1.0, 2.0])
def test_kernel_arguments_match_the_reference(
    batch_params: list[SamplingParams], mapped: bool, sharpness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments of the GPU kernels describe each row as the noise and logits processing of other devices do."""
    roots, depth = list(range(5, 5 + len(batch_params))), 3
    batch_R, depth_R = grid(len(batch_params), depth)
    ids_V = torch.arange(0, VOCABULARY, 2) if mapped else None
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


SIZE = 70
TREE = Tree((-1, 0, 0, 1, 3), 4)
"""Two children of the root, a grandchild, and a shadow node."""
VERIFIED = [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]
"""Verified nodes of the batch, one tree after the other: (sequence, node)."""


class SumGuide:
    """Guide that allows exactly the token whose id is the sum of the path, and no path with token 9."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def mask(self, path: Sequence[int] = ()) -> NDArray[np.uint32] | None:
        self.asked.append(tuple(path))
        if 9 in path:
            return None
        mask = np.zeros(3, dtype=np.uint32)
        mask[sum(path) // 32] = np.uint32(1 << sum(path) % 32)
        return mask


def rows_of(batch: torch.Tensor, node: torch.Tensor) -> SampledRows:
    none = torch.zeros_like(batch)
    return SampledRows(batch, node, none.float(), none, none, None)


def allowed(masks: TokenMasks, *places: tuple[int, int], mask_rows: torch.Tensor | None = None) -> list[list[int]]:
    """Return the tokens that nodes may choose. ``mask_rows`` are those that `TokenMasks.prepare` returned."""
    rows = rows_of(*(torch.tensor(column) for column in zip(*places, strict=True)))
    if mask_rows is not None:
        rows = dataclasses.replace(rows, mask_row_R=mask_rows[[VERIFIED.index(place) for place in places]])
    blocked = masks.blocked(rows)
    assert blocked.shape == (len(places), SIZE)
    return [torch.nonzero(~row)[:, 0].tolist() for row in blocked]


def masks_of(guide: SumGuide, tokens: Sequence[int]) -> TokenMasks:
    """Return the masks of a batch whose second sequence is guided; its tree has these tokens."""
    tokens_SP = torch.zeros(3, 20, dtype=torch.int64)
    tokens_SP[2, 6 : 6 + len(tokens)] = torch.tensor(tokens)
    texts = BatchTokens(tokens_SP, torch.tensor([0, 2]), torch.tensor([3, 5]))
    return TokenMasks([None, guide], texts, forest_of((PLAIN, TREE), CPU), SIZE)


EVERY = list(range(SIZE))


@pytest.mark.parametrize("prepared", [False, True], ids=["while drafting", "for the target"])
def test_masks_follow_the_path_of_each_node(prepared: bool) -> None:
    guide = SumGuide()
    masks = masks_of(guide, [30, 4, 35, 2])
    mask_rows = None
    if prepared:
        masks.load_tokens()
        mask_rows = masks.prepare()
    found = allowed(masks, (1, 0), (1, 1), (0, 0), (1, 2), (1, 3), mask_rows=mask_rows)
    assert found == [[0], [30], EVERY, [4], [65]]
    assert {*guide.asked} == {(), (30,), (4,), (30, 35)}
    assert allowed(masks, (1, 3), (1, 0), mask_rows=mask_rows) == [[65], [0]]
    assert len(guide.asked) == 4, "a mask is computed once"


def test_a_path_that_the_grammar_does_not_allow_blocks_nothing() -> None:
    masks = masks_of(SumGuide(), [9, 4, 35, 2])
    assert allowed(masks, (1, 1), (1, 3), (1, 2)) == [EVERY, EVERY, [4]]


def test_no_rows_have_no_masks() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert masks_of(SumGuide(), [1, 2, 3, 4]).blocked(rows_of(none, none)).shape == (0, SIZE)


def test_given_trees_need_no_draft_pass() -> None:
    chain = given_chain(3)
    assert (chain.depth, chain.drafted_depth, chain.expanded, chain.is_chain) == (3, 0, (), True)
    forest = forest_of((chain, PLAIN), CPU)
    assert (forest.levels, forest.depth) == ((), 3)
    drafted = forest_of((chain, Tree((-1, 0, 1), 3)), CPU)
    assert [level.counts for level in drafted.levels] == [(0, 1), (0, 1)]
