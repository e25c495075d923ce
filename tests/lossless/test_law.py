"""Distribution of the emitted tokens: joint 3-token outcomes of 100,000 requests against exact probabilities.

The target is a table p(next | last) over five tokens and the draft a noised copy of it, so that all requests run at
once. The same test must detect each bug that is planted in the samplers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from msgspec import structs
from scipy.stats import chi2
from torch import Tensor

from specdecode_kernels.noise.reference import COIN_STREAM
from specdecode_kernels.sample.reference import processed
from specdecode_kernels.step_tables.op import commit
from specdecode_kernels.step_tables.tables import SlotState, StepRows, Verified
from specdecode_kernels.verify import op as verify
from specdecode_kernels.verify import reference as chosen_module
from specdecode_worker.contract import TreeShape
from specdecode_worker.core.messages import Submit
from specdecode_worker.sampling import sampler as sampler_module
from specdecode_worker.sampling.params import SamplingParams
from specdecode_worker.sampling.sampler import BatchTokens, SampledRows, StepSampler, sampler_of
from specdecode_worker.sampling.trees import Forest, Nodes, tree_of
from support.lossless.plain_decoding import with_processors
from support.tiers import by_effort

DRAWS = by_effort(quick=100_000, full=100_000, nightly=200_000)
DRAWS_WITH_BUG = 40_000
"""Number of draws with a planted bug: every bug must be large enough that few draws show it."""
VOCABULARY, PAGE = 5, 16
TREE = tree_of(TreeShape.levels(2, 2))
PARENTS = torch.tensor(TREE.parents)
SAMPLING_PARAMS = {
    "T1": SamplingParams(max_tokens=1, seed=0),
    "T0.7-p0.9": SamplingParams(max_tokens=1, seed=0, temperature=0.7, top_p=0.9),
    "all": SamplingParams(
        max_tokens=1,
        seed=0,
        temperature=0.9,
        top_k=4,
        top_p=0.97,
        min_p=0.02,
        presence_penalty=0.3,
        frequency_penalty=0.5,
        repetition_penalty=1.3,
        logit_bias=((2, 0.6), (3, -0.4)),
        min_tokens=2,
        stop_token_ids=(1,),
        blocked=(1,),
    ),
}
STEPS = 3  # each step emits at least one token
PROMPT = (3, 0)
"""Prompt of all requests. Its last token is the first root; the penalties count both tokens."""


@pytest.fixture(autouse=True)
def _large_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adjust several pieces of 8,192 rows: at the usual size, calls on five tokens would be all of the time."""
    monkeypatch.setattr(sampler_module, "ADJUSTED_AT_ONCE", 8192)


_GENERATOR = torch.Generator().manual_seed(11)
TARGET = 1.2 * torch.randn(VOCABULARY, VOCABULARY, generator=_GENERATOR, dtype=torch.float64)
DRAFT = TARGET + 0.7 * torch.randn(VOCABULARY, VOCABULARY, generator=_GENERATOR, dtype=torch.float64)
"""Logits of the target and of the draft for every last token, [V, V] each."""


def _p(params: SamplingParams, answer: tuple[int, ...]) -> Tensor:
    """Return the reference probabilities of the token after an answer, [V]."""
    request = Submit(request_id="", prompt=PROMPT, sampling=params)
    logits = with_processors(TARGET[None, [*PROMPT, *answer][-1]], request, list(answer))
    cuts = torch.tensor([params.top_k]), torch.tensor([params.top_p]), torch.tensor([params.min_p])
    return processed(logits, torch.tensor([params.temperature]), *cuts)[0].exp()


@lru_cache(maxsize=2)
def _batch_params(count: int, params: SamplingParams) -> list[SamplingParams]:
    return [structs.replace(params, seed=seed, prompt_tokens=len(PROMPT)) for seed in range(count)]


def _step(
    params: SamplingParams, said_BP: Tensor, root_B: Tensor, *, coupled: bool, draws: bool
) -> tuple[Tensor, Tensor]:
    """Run one speculative step from each root and return (emitted tokens [B, D], their count [B]).

    A root is an index into ``said_BP``, to which the tree's tokens are written. Without ``draws`` the draft's most
    likely tokens are proposed instead of the sampler's proposals.
    """
    batch, nodes = len(root_B), len(PARENTS)
    rows_B = torch.arange(batch)
    forest = Forest((TREE,) * batch, (), PARENTS.expand(batch, -1), TREE.depth, all_chains=False)
    slots_B1, roots_B1 = torch.cat((rows_B, rows_B[:1])), torch.cat((root_B, root_B[:1]))
    texts, longest = BatchTokens(said_BP, slots_B1, roots_B1), int(root_B.max()) + 1
    sampler = sampler_of(_batch_params(batch, params), texts, forest, VOCABULARY, longest=longest, coupled=coupled)
    for node, depth in enumerate(TREE.depths):
        children = [child for child, parent in enumerate(TREE.parents) if parent == node]
        if children:
            at = Nodes(rows_B, torch.full_like(rows_B, node), torch.full_like(rows_B, depth))
            logits = DRAFT[said_BP[rows_B, root_B + node]]
            best = (
                sampler.propose(logits, None, at, 1.0, len(children))
                if draws
                else logits.topk(len(children), dim=-1).indices
            )
            said_BP[rows_B[:, None], root_B[:, None] + torch.tensor(children)] = best
    tokens_R = said_BP.gather(1, root_B[:, None] + torch.arange(nodes)).flatten()
    depth_R = torch.tensor(TREE.depths).repeat(batch)
    at = Nodes(rows_B.repeat_interleave(nodes), torch.arange(nodes).repeat(batch), depth_R)
    starts, logits_RV = nodes * torch.arange(batch + 1), TARGET[tokens_R]
    verified = sampler.verified(sampler.at(at), tokens_R, logits_RV, starts, forest.parents_BN, TREE.depth)
    blocks = torch.zeros(batch + 1, said_BP.shape[1] // PAGE + 1, dtype=torch.int64)
    state = SlotState(said_BP.clone(), torch.zeros(batch, dtype=torch.int64), blocks, PAGE)
    trees, limits_B = Verified(starts, forest.parents_BN, *verified), torch.full((batch,), nodes)
    out = commit(state, StepRows(slots_B1, roots_B1, blocks), trees, None, limits_B, TREE.depth).out
    return out[:, : TREE.depth + 1], out[:, -1] + 1


SAMPLERS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "coupled": partial(_step, coupled=True, draws=True),
    "mss-best": partial(_step, coupled=False, draws=False),
    "mss-drawn": partial(_step, coupled=False, draws=True),
}


def _p_value(sampler: str, params: SamplingParams, draws: int = DRAWS) -> float:
    """Return the p-value of the chi-square test over joint outcomes, or 0 if an impossible outcome occurred."""
    begin = len(PROMPT)
    root_B = torch.full((draws,), begin - 1)
    said = torch.zeros(draws, begin + STEPS * (TREE.depth + 1) + len(PARENTS) + 1, dtype=torch.int64)
    said[:, :begin] = torch.tensor(PROMPT)
    rows_B1 = torch.arange(draws)[:, None]
    for _ in range(STEPS):
        emitted_BD, count_B = SAMPLERS[sampler](params, said, root_B)
        step_D = torch.arange(emitted_BD.shape[1])
        index = torch.where(step_D < count_B[:, None], root_B[:, None] + 1 + step_D, said.shape[1] - 1)
        said[rows_B1, index] = emitted_BD
        root_B = root_B + count_B
    return _chi_square(said[:, begin : begin + 3], _joint(params))


def _joint(params: SamplingParams) -> Tensor:
    """Return the joint probabilities of the first three tokens, [V * V * V]."""
    words = range(VOCABULARY)
    first = _p(params, ())
    second = {a: _p(params, (a,)) for a in words}
    third = {(a, b): _p(params, (a, b)) for a in words for b in words}
    return torch.cat([first[a] * second[a][b] * third[a, b] for a in words for b in words])


def _chi_square(said_B3: Tensor, joint: Tensor) -> float:
    """Return the p-value of 3-token outcomes [B, 3] against their joint probabilities, pooling rare outcomes."""
    expected = joint * len(said_B3)
    cell = said_B3[:, 0] * VOCABULARY**2 + said_B3[:, 1] * VOCABULARY + said_B3[:, 2]
    observed = torch.bincount(cell, minlength=len(expected)).double()
    if observed[expected == 0].any():
        return 0.0
    common = expected >= 5
    rare = (observed[~common].sum(), expected[~common].sum())
    statistic = ((observed - expected) ** 2 / expected)[common].sum()
    statistic += (rare[0] - rare[1]) ** 2 / rare[1] if rare[1] > 0 else 0
    return float(chi2.sf(float(statistic), int(common.sum()) - (rare[1] == 0).item()))


@pytest.mark.parametrize("params", ["T1", "T0.7-p0.9", pytest.param("all", marks=pytest.mark.core)])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_joint_distribution(sampler: str, params: str) -> None:
    assert _p_value(sampler, SAMPLING_PARAMS[params]) > 1e-3


def _no_renormalisation(patch: pytest.MonkeyPatch) -> None:
    """Draw the next token from the distribution without renormalising it after a rejection."""
    patch.setattr(verify, "normalised", lambda left, otherwise: left)


def _unmasked_bonus(patch: pytest.MonkeyPatch) -> None:
    """Draw the token after the accepted path without removing rejected tokens and without top-k, top-p or min-p."""
    right = verify._try_children
    patch.setattr(verify, "_try_children", lambda *args: (right(*args)[0], args[2]))
    for module in (sampler_module.op, chosen_module):
        patch.setattr(module, "processed", lambda logits, *_, **__: torch.log_softmax(logits, -1))


def _reused_coin(patch: pytest.MonkeyPatch) -> None:
    """Use the same random number for all children of a node, and the same noise at every position."""
    right, noise = verify.uniform, chosen_module.gumbel
    patch.setattr(verify, "uniform", lambda *args: right(*args)[:, :1].expand(-1, args[2]))
    for module in (chosen_module, sampler_module):
        patch.setattr(module, "gumbel", lambda seed, position, *rest: noise(seed, position * 0, *rest))


def _coin_of_the_draft(patch: pytest.MonkeyPatch) -> None:
    """Verify proposals with the same random numbers with which they were drawn."""
    patch.setattr(sampler_module, "PROPOSAL_STREAM", COIN_STREAM)


def _wrong_parent(patch: pytest.MonkeyPatch) -> None:
    """Verify every node with the target's logits at its grandparent instead of its parent."""
    up, right = PARENTS.clamp(min=0), StepSampler.verified

    def verified(self: StepSampler, rows: Any, tokens: Any, logits: Tensor, *rest: Any) -> Any:
        return right(self, rows, tokens, logits.unflatten(0, (-1, len(up)))[:, up].flatten(0, 1), *rest)

    patch.setattr(StepSampler, "verified", verified)


def _noise_of_the_tree(patch: pytest.MonkeyPatch) -> None:
    """Index the noise by node instead of by position."""
    right = StepSampler.choose

    def choose(self: StepSampler, rows: SampledRows, logits: Tensor) -> Tensor:
        next_R = self._texts.roots_B[rows.sequence_R] + 1 + rows.node_R % (TREE.depth + 1)
        return right(self, replace(rows, next_R=next_R), logits)

    patch.setattr(StepSampler, "choose", choose)


def _drawn_from_another(patch: pytest.MonkeyPatch) -> None:
    """Verify proposals as if they had been drawn from the draft's distribution at temperature 1."""
    right = StepSampler._drawn

    def drawn(self: StepSampler, rows: SampledRows, logits: Tensor, *rest: Any) -> Tensor:
        proposals = right(self, rows, logits, *rest)
        self._store(rows, torch.log_softmax(logits, -1), rows.temperature_R > 0)
        return proposals

    patch.setattr(StepSampler, "_drawn", drawn)


def _blind_to_the_tree(patch: pytest.MonkeyPatch) -> None:
    """Count only the tokens before the root for the penalties, and no token of the path."""
    right = sampler_module.ancestors_of
    patch.setattr(sampler_module, "ancestors_of", lambda *args: torch.zeros_like(right(*args)))


def _path_of_the_sibling(patch: pytest.MonkeyPatch) -> None:
    """Count the tokens on the path of the preceding node for the penalties."""
    right = sampler_module.ancestors_of
    patch.setattr(sampler_module, "ancestors_of", lambda *args: right(*args).roll(1, 1))


ALL, COUNTED = ("coupled", "mss-best", "mss-drawn"), "all"
BUGS = {
    "no-renormalisation": (_no_renormalisation, "T0.7-p0.9", ("mss-best", "mss-drawn")),
    "unmasked-bonus": (_unmasked_bonus, "T0.7-p0.9", ALL),
    "reused-coin": (_reused_coin, "T0.7-p0.9", ALL),
    "coin-of-the-draft": (_coin_of_the_draft, "T0.7-p0.9", ("mss-drawn",)),
    "wrong-parent": (_wrong_parent, "T0.7-p0.9", ALL),
    "noise-of-the-tree": (_noise_of_the_tree, "T0.7-p0.9", ("coupled",)),
    "drawn-from-another": (_drawn_from_another, "T0.7-p0.9", ("mss-drawn",)),
    "blind-to-the-tree": (_blind_to_the_tree, COUNTED, ALL),
    "path-of-the-sibling": (_path_of_the_sibling, COUNTED, ALL),
}
"""Planted bugs: the patch, the sampling parameters that expose it, and the samplers that it affects."""


@pytest.mark.proof("planted")
@pytest.mark.parametrize(
    ("bug", "params", "sampler"),
    [
        pytest.param(plant, params, sampler, id=f"{name}-{sampler}")
        for name, (plant, params, hit) in BUGS.items()
        for sampler in hit
    ],
)
def test_planted_bug_is_detected(
    bug: Callable[[pytest.MonkeyPatch], None], params: str, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    assert _p_value(sampler, SAMPLING_PARAMS[params], DRAWS_WITH_BUG) < 1e-6
