"""Tests of logits processing along a tree.

Every node uses the tokens on its own path, rows without adjustments are unchanged, and a draft with a smaller
vocabulary is processed like the target.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdecode_kernels.sample import reference
from specdecode_worker.contract import TreeShape
from specdecode_worker.sampling import logits as module
from specdecode_worker.sampling.columns import BatchTokens
from specdecode_worker.sampling.coupling import Coupling
from specdecode_worker.sampling.logits import LogitsProcessor
from specdecode_worker.sampling.params import SamplingParams
from specdecode_worker.sampling.trees import Group, Nodes, Tree, forest_of, paths_of, tree_of

V, CPU = 11, torch.device("cpu")
FREE = SamplingParams(seed=1, temperature=1.0, top_k=0, top_p=1.0)
SAMPLING_PARAMS = [
    FREE,
    replace(FREE, temperature=0.0),
    replace(FREE, temperature=0.0, presence_penalty=0.7),
    replace(FREE, frequency_penalty=-0.4, top_k=4),
    replace(FREE, repetition_penalty=1.6, min_p=0.1),
    replace(FREE, logit_bias=((2, 1.5), (7, -100.0)), temperature=0.0),
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
        return BatchTokens(self.tokens, self.slots, self.roots, int(self.roots.max()) + 1)

    @property
    def processing(self) -> LogitsProcessor:
        return LogitsProcessor(self.batch_params, self.texts, self.forest, V)

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
    adjusted = case.processing.adjusted(case.logits, None, case.at)
    assert torch.equal(adjusted, torch.stack([case.wanted(row) for row in range(len(case.logits))]))


@given(cases())
def test_masked_and_indexed_rows_give_the_same_result(case: Case) -> None:
    """The mask that selects rows on an accelerator gives the same result as row indices."""
    right = Group.of
    coupling = Coupling(case.batch_params, case.texts, case.forest, V)
    at = case.at.batch_R, case.at.node_R, case.at.depth_R
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "of", lambda self, batch: replace(right(self, batch), rows=None))
        masked = coupling.choose(case.logits, *at), coupling.propose(case.logits, None, *at, 1.3, 4)
    assert torch.equal(masked[0], coupling.choose(case.logits, *at))
    assert torch.equal(masked[1], coupling.propose(case.logits, None, *at, 1.3, 4))


@given(cases())
def test_a_perfect_draft_proposes_what_the_target_chooses(case: Case) -> None:
    sampler = Coupling(case.batch_params, case.texts, case.forest, V)
    at = case.at.batch_R, case.at.node_R, case.at.depth_R
    proposed = sampler.propose(case.logits, None, *at, 1.0, 3)
    assert torch.equal(proposed[:, 0], sampler.choose(case.logits, *at))


@given(cases())
def test_draft_with_a_smaller_vocabulary_is_adjusted_by_target_ids(case: Case) -> None:
    ids = torch.arange(0, V, 2)
    narrow = case.processing.adjusted(case.logits[:, ids], ids, case.at)
    wide = case.processing.adjusted(case.logits, None, case.at)
    assert torch.equal(narrow, wide[:, ids])


@given(cases(), st.sampled_from((torch.float32, torch.bfloat16)))
def test_a_choice_is_the_same_alone_and_in_a_batch(case: Case, dtype: torch.dtype) -> None:
    logits = case.logits.to(dtype)
    at = case.at.batch_R, case.at.node_R, case.at.depth_R
    together = Coupling(case.batch_params, case.texts, case.forest, V).choose(logits, *at)
    for b, params in enumerate(case.batch_params):
        rows = case.at.batch_R == b
        texts = BatchTokens(case.tokens, case.slots[b : b + 1], case.roots[b : b + 1], int(case.roots[b]) + 1)
        forest = forest_of((case.forest.trees[b],), CPU)
        alone = Coupling([params], texts, forest, V)
        own = torch.zeros_like(case.at.batch_R[rows]), case.at.node_R[rows], case.at.depth_R[rows]
        assert torch.equal(alone.choose(logits[rows], *own), together[rows])


def test_default_parameters_cost_no_processing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch with default greedy parameters takes the argmax of the given logits without copies, casts or counts."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("nobody asked for it")

    monkeypatch.setattr(module.op, "adjusted", never)
    monkeypatch.setattr(module.op, "processed", never)
    monkeypatch.setattr(module.TokenCounts, "counts", never)
    case = Case([SAMPLING_PARAMS[1]] * 3, [tree_of(shape) for shape in SHAPES[:3]], 5)
    at = case.at.batch_R, case.at.node_R, case.at.depth_R
    sampler = Coupling(case.batch_params, case.texts, case.forest, V)
    assert torch.equal(sampler.choose(case.logits, *at), case.logits.argmax(-1))
    assert case.processing.adjusted(case.logits, None, case.at) is case.logits


def test_only_rows_with_adjustments_are_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    right = module.op.adjusted
    monkeypatch.setattr(
        module.op, "adjusted", lambda logits, **rest: (seen.append(len(logits)), right(logits, **rest))[1]
    )
    case = Case(
        [SAMPLING_PARAMS[1], SAMPLING_PARAMS[2], SAMPLING_PARAMS[1]], [tree_of(shape) for shape in SHAPES[:3]], 5
    )
    case.processing.adjusted(case.logits, None, case.at)
    assert seen == [4]


def test_paths_lead_from_below_the_root_to_the_node() -> None:
    tree = tree_of(TreeShape.parse("0,0,1,2,2"))
    assert tree.paths == ((), (1,), (2,), (1, 3), (2, 4), (2, 5))
    paths = paths_of((tree, tree_of(TreeShape.chain(1))), CPU)
    assert paths.tolist() == [
        [[0, 0], [1, 0], [2, 0], [1, 3], [2, 4], [2, 5]],
        [[0, 0], [1, 0], [0, 0], [0, 0], [0, 0], [0, 0]],
    ]
