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
from specdecode_worker.speculation.sampling import logits_processing as module
from specdecode_worker.speculation.sampling.coupling import Coupling
from specdecode_worker.speculation.sampling.logits_processing import Processing
from specdecode_worker.speculation.sampling.params import Law
from specdecode_worker.speculation.sampling.row_selection import Group, Nodes
from specdecode_worker.speculation.sampling.token_counts import Texts
from specdecode_worker.speculation.trees import Tree, forest_of, paths_of, tree_of

V, CPU = 11, torch.device("cpu")
FREE = Law(seed=1, temperature=1.0, top_k=0, top_p=1.0)
LAWS = [
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

    def __init__(self, laws: list[Law], trees: list[Tree], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        batch = len(laws)
        prompts = torch.randint(1, 6, (batch,), generator=generator)
        answers = torch.randint(0, 7, (batch,), generator=generator)
        self.roots = prompts + answers - 1
        self.tokens = torch.randint(0, V, (batch, 30), generator=generator)
        self.slots = torch.randperm(batch, generator=generator)
        self.laws = [replace(law, prompt_tokens=int(n)) for law, n in zip(laws, prompts, strict=True)]
        self.forest = forest_of(tuple(trees), CPU)
        places = [(b, n, tree.depths[n]) for b, tree in enumerate(trees) for n in range(tree.verified)]
        self.at = Nodes(*torch.tensor(places).unbind(1))
        self.logits = 2 * torch.randn(len(places), V, generator=generator, dtype=torch.float64)

    @property
    def texts(self) -> Texts:
        return Texts(self.tokens, self.slots, self.roots, int(self.roots.max()) + 1)

    @property
    def processing(self) -> Processing:
        return Processing(self.laws, self.texts, self.forest, V)

    def answer(self, row: int) -> list[int]:
        """Return the expected answer of a row: the answer up to the root, then the path in the tree."""
        b, node = int(self.at.batch_R[row]), int(self.at.node_R[row])
        said, root = self.tokens[self.slots[b]].tolist(), int(self.roots[b])
        path = []
        while node:
            path.append(said[root + node])
            node = self.forest.trees[b].parents[node]
        return said[self.laws[b].prompt_tokens : root + 1] + path[::-1]

    def wanted(self, row: int) -> Tensor:
        """Return the expected logits of a row."""
        law = self.laws[int(self.at.batch_R[row])]
        answer = self.answer(row)
        prompt = self.tokens[self.slots[self.at.batch_R[row]]].tolist()[: law.prompt_tokens]
        bias = torch.zeros(1, V)
        for token, value in law.logit_bias:
            bias[0, token] = value
        blocked = torch.zeros(1, V, dtype=torch.bool)
        blocked[0, list(law.blocked)] = len(answer) < law.min_tokens
        return reference.adjusted(
            self.logits[row : row + 1],
            bias_RV=bias,
            blocked_RV=blocked,
            prompt_RV=torch.tensor([[token in prompt for token in range(V)]]),
            counts_RV=torch.tensor([[answer.count(token) for token in range(V)]]),
            repetition_R=torch.tensor([law.repetition_penalty]),
            frequency_R=torch.tensor([law.frequency_penalty]),
            presence_R=torch.tensor([law.presence_penalty]),
        )[0]


def sized(draw: st.DrawFn, items: list[Any], count: int) -> list[Any]:
    """Draw ``count`` items."""
    return draw(st.lists(st.sampled_from(items), min_size=count, max_size=count))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a batch of sequences with trees."""
    count = draw(st.integers(1, 5))
    trees = [tree_of(shape, draw(st.integers(0, 4))) for shape in sized(draw, SHAPES, count)]
    return Case(sized(draw, LAWS, count), trees, draw(st.integers(0, 999)))


@given(cases())
def test_every_node_counts_its_own_path(case: Case) -> None:
    found = case.processing.adjusted(case.logits, None, case.at)
    assert torch.equal(found, torch.stack([case.wanted(row) for row in range(len(case.logits))]))


@given(cases())
def test_a_mask_gives_what_looking_gives(case: Case) -> None:
    """The mask that selects rows on an accelerator gives the same result as row indices."""
    right = Group.of
    found = Coupling(case.laws, case.texts, case.forest, V)
    at = case.at.batch_R, case.at.node_R, case.at.depth_R
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "of", lambda self, batch: replace(right(self, batch), rows=None))
        masked = found.choose(case.logits, *at), found.propose(case.logits, None, *at, 1.3, 4)
    assert torch.equal(masked[0], found.choose(case.logits, *at))
    assert torch.equal(masked[1], found.propose(case.logits, None, *at, 1.3, 4))


@given(cases())
def test_a_perfect_draft_proposes_what_the_target_chooses(case: Case) -> None:
    sampler = Coupling(case.laws, case.texts, case.forest, V)
    at = case.at.batch_R, case.at.node_R, case.at.depth_R
    proposed = sampler.propose(case.logits, None, *at, 1.0, 3)
    assert torch.equal(proposed[:, 0], sampler.choose(case.logits, *at))


@given(cases())
def test_a_draft_of_fewer_words_is_held_to_the_targets(case: Case) -> None:
    ids = torch.arange(0, V, 2)
    narrow = case.processing.adjusted(case.logits[:, ids], ids, case.at)
    wide = case.processing.adjusted(case.logits, None, case.at)
    assert torch.equal(narrow, wide[:, ids])


@given(cases(), st.sampled_from((torch.float32, torch.bfloat16)))
def test_a_choice_is_the_same_alone_and_in_a_batch(case: Case, dtype: torch.dtype) -> None:
    logits = case.logits.to(dtype)
    at = case.at.batch_R, case.at.node_R, case.at.depth_R
    together = Coupling(case.laws, case.texts, case.forest, V).choose(logits, *at)
    for b, law in enumerate(case.laws):
        rows = case.at.batch_R == b
        texts = Texts(case.tokens, case.slots[b : b + 1], case.roots[b : b + 1], int(case.roots[b]) + 1)
        forest = forest_of((case.forest.trees[b],), CPU)
        alone = Coupling([law], texts, forest, V)
        own = torch.zeros_like(case.at.batch_R[rows]), case.at.node_R[rows], case.at.depth_R[rows]
        assert torch.equal(alone.choose(logits[rows], *own), together[rows])


def test_a_batch_that_asks_for_nothing_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch with default greedy parameters takes the argmax of the given logits without copies, casts or counts."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("nobody asked for it")

    monkeypatch.setattr(module.op, "adjusted", never)
    monkeypatch.setattr(module.op, "processed", never)
    monkeypatch.setattr(module.History, "counts", never)
    case = Case([LAWS[1]] * 3, [tree_of(shape) for shape in SHAPES[:3]], 5)
    at = case.at.batch_R, case.at.node_R, case.at.depth_R
    sampler = Coupling(case.laws, case.texts, case.forest, V)
    assert torch.equal(sampler.choose(case.logits, *at), case.logits.argmax(-1))
    assert case.processing.adjusted(case.logits, None, case.at) is case.logits


def test_only_rows_that_ask_are_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    right = module.op.adjusted
    monkeypatch.setattr(
        module.op, "adjusted", lambda logits, **rest: (seen.append(len(logits)), right(logits, **rest))[1]
    )
    case = Case([LAWS[1], LAWS[2], LAWS[1]], [tree_of(shape) for shape in SHAPES[:3]], 5)
    case.processing.adjusted(case.logits, None, case.at)
    assert seen == [4]


def test_paths_lead_from_below_the_root_to_the_node() -> None:
    tree = tree_of(TreeShape.parse("0,0,1,2,2"))
    assert tree.paths == ((), (1,), (2,), (1, 3), (2, 4), (2, 5))
    found = paths_of((tree, tree_of(TreeShape.chain(1))), CPU)
    assert found.tolist() == [
        [[0, 0], [1, 0], [2, 0], [1, 3], [2, 4], [2, 5]],
        [[0, 0], [1, 0], [0, 0], [0, 0], [0, 0], [0, 0]],
    ]
