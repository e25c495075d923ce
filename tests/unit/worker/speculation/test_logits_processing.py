"""Tests of logits processing along a tree.

Every node uses the tokens on its own path, rows without adjustments are unchanged, and a draft with a smaller
vocabulary is processed like the target.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from specdecode_kernels.sample import reference
from specdecode_worker.contract import TreeShape
from specdecode_worker.sampling import sampler as module
from specdecode_worker.sampling.params import SamplingParams
from specdecode_worker.sampling.sampler import BatchTokens, StepSampler, sampler_of
from specdecode_worker.sampling.trees import Nodes, Tree, ancestors_of, forest_of, tree_of

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
