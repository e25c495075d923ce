"""The law of what speculation emits: joint 3-token outcomes of 200,000 requests against the exact probabilities.

The target is a table p(next | last) over five tokens, the draft a noised copy of it, so that all requests run at
once. Each planted bug must be seen by the very same test.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from specdecode_kernels.sample.reference import processed
from specdecode_kernels.verify import op as verify
from specdecode_worker.contract import TreeShape
from specdecode_worker.speculation import coupling as coupling_module
from specdecode_worker.speculation.accept import accept
from specdecode_worker.speculation.coupling import Coupling, Law
from specdecode_worker.speculation.trees import Forest, tree_of

DRAWS = 200_000
DRAWS_WITH_BUG = 40_000
"""A planted bug must be so large that a fifth of the draws shows it."""
VOCABULARY = 5
TREE = tree_of(TreeShape.levels(2, 2))
PARENTS = torch.tensor(TREE.parents)
LAWS = {"T1": (1.0, 1.0), "T0.7-p0.9": (0.7, 0.9)}
STEPS = 3  # each emits a token at least


def _tables() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    target = 1.2 * torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
    return target, target + 0.7 * torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)


TARGET, DRAFT = _tables()


def _logp(table: Tensor, law: str) -> Tensor:
    temperature, top_p = LAWS[law]
    rows = torch.ones(len(table))
    return processed(table, temperature * rows, torch.zeros(len(table), dtype=torch.int64), top_p * rows)


@lru_cache(maxsize=2)
def _laws(count: int, temperature: float, top_p: float) -> list[Law]:
    return [Law(seed, temperature, 0, top_p) for seed in range(count)]


def _coupled_step(law: str, root_B: Tensor, position_B: Tensor) -> tuple[Tensor, Tensor]:
    """(emitted [B, D], how many [B]) of one speculative step behind each root."""
    temperature, top_p = LAWS[law]
    batch = len(root_B)
    coupling = Coupling(_laws(batch, temperature, top_p), position_B, TREE.depth, VOCABULARY)
    tokens_BN = root_B[:, None].repeat(1, len(PARENTS))
    rows_B = torch.arange(batch)
    for node, depth in enumerate(TREE.depths):
        children = [child for child, parent in enumerate(TREE.parents) if parent == node]
        if children:
            logits = DRAFT[tokens_BN[:, node]]
            best = coupling.propose(logits, None, rows_B, torch.full_like(rows_B, depth), 1.0, len(children))
            tokens_BN[:, children] = best
    batch_R = rows_B.repeat_interleave(len(PARENTS))
    depth_R = torch.tensor(TREE.depths).repeat(batch)
    chosen_BN = coupling.choose(TARGET[tokens_BN.flatten()], batch_R, depth_R).view_as(tokens_BN)
    forest = Forest((TREE,), (), PARENTS.expand(batch, -1), TREE.depth, all_chains=False)
    outcome = accept(forest, tokens_BN, chosen_BN, None)
    return outcome.emitted_BD, outcome.count_B + 1


def _multi_round_step(law: str, root_B: Tensor, position_B: Tensor, *, sampled: bool) -> tuple[Tensor, Tensor]:
    """The same by multi-round sampling, of proposals that are the draft's best or drawn from it."""
    logp, logq = _logp(TARGET, law), _logp(DRAFT, "T1")
    tokens_BN = root_B[:, None].repeat(1, len(PARENTS))
    generator = torch.Generator().manual_seed(int(position_B.sum()))
    for node in range(len(PARENTS)):
        children = [child for child, parent in enumerate(TREE.parents) if parent == node]
        if children:
            scores = logq[tokens_BN[:, node]]
            if sampled:
                uniform = torch.rand(scores.shape, generator=generator, dtype=torch.float64)
                scores = scores - torch.log(-torch.log(uniform))
            tokens_BN[:, children] = scores.topk(len(children), dim=-1).indices
    found = verify.multi_round(
        PARENTS.expand(len(root_B), -1),
        tokens_BN,
        logp[tokens_BN],
        logq[tokens_BN] if sampled else None,
        torch.arange(len(root_B)),
        position_B,
        TREE.depth,
    )
    path_tokens = tokens_BN.gather(1, found.path_BD.clamp(min=0))
    emitted = torch.cat((path_tokens, torch.zeros_like(root_B)[:, None]), dim=1)
    return emitted.scatter(1, found.count_B[:, None], found.bonus_B[:, None]), found.count_B + 1


SAMPLERS: dict[str, Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "coupled": _coupled_step,
    "mss-best": partial(_multi_round_step, sampled=False),
    "mss-drawn": partial(_multi_round_step, sampled=True),
}


def _p_value(sampler: str, law: str, draws: int = DRAWS) -> float:
    """Of the chi-square test over joint outcomes; 0 when something came out that cannot."""
    root_B = torch.zeros(draws, dtype=torch.int64)
    position_B = torch.zeros_like(root_B)
    said = torch.zeros(draws, STEPS * (TREE.depth + 1) + 1, dtype=torch.int64)
    rows_B1 = torch.arange(draws)[:, None]
    for _ in range(STEPS):
        emitted_BD, count_B = SAMPLERS[sampler](law, root_B, position_B)
        step_D = torch.arange(emitted_BD.shape[1])
        index = torch.where(step_D < count_B[:, None], position_B[:, None] + step_D, said.shape[1] - 1)
        said[rows_B1, index] = emitted_BD
        position_B = position_B + count_B
        root_B = said[rows_B1[:, 0], position_B - 1]
    return _chi_square(said[:, :3], _logp(TARGET, law).exp())


def _chi_square(said_B3: Tensor, p_VV: Tensor) -> float:
    joint = p_VV[0][:, None, None] * p_VV[:, :, None] * p_VV[None, :, :]
    expected = joint.flatten() * len(said_B3)
    cell = said_B3[:, 0] * VOCABULARY**2 + said_B3[:, 1] * VOCABULARY + said_B3[:, 2]
    observed = torch.bincount(cell, minlength=len(expected)).double()
    if observed[expected == 0].any():
        return 0.0
    common = expected >= 5
    rare = (observed[~common].sum(), expected[~common].sum())
    statistic = ((observed - expected) ** 2 / expected)[common].sum()
    statistic += (rare[0] - rare[1]) ** 2 / rare[1] if rare[1] > 0 else 0
    return float(chi2.sf(float(statistic), int(common.sum()) - (rare[1] == 0).item()))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_joint_law(sampler: str, law: str) -> None:
    assert _p_value(sampler, law) > 1e-3


def _no_renormalisation(patch: pytest.MonkeyPatch) -> None:
    def residual(p_BV: Tensor, q_BV: Tensor | None, x_B1: Tensor) -> tuple[Tensor, Tensor | None]:
        p_BV = p_BV.scatter(1, x_B1, 0.0) if q_BV is None else (p_BV - q_BV).clamp(min=0)
        return p_BV, q_BV

    patch.setattr(verify, "residual", residual)


def _unmasked_bonus(patch: pytest.MonkeyPatch) -> None:
    """The token behind the accepted path is drawn as if nothing had been refused, or cut."""
    right = verify._try_children

    def try_children(*args: Tensor) -> tuple[Tensor, Tensor]:
        return right(*args)[0], args[3]  # type: ignore[arg-type]

    patch.setattr(verify, "_try_children", try_children)
    patch.setattr(coupling_module, "processed", lambda logits, *_, **__: torch.log_softmax(logits, -1))


def _reused_coin(patch: pytest.MonkeyPatch) -> None:
    right, noise = verify.uniform, coupling_module.gumbel
    patch.setattr(verify, "uniform", lambda *args: right(*args)[:, :1].expand(-1, args[2]))
    patch.setattr(coupling_module, "gumbel", lambda seed, position, size: noise(seed, position * 0, size))


def _wrong_parent(patch: pytest.MonkeyPatch) -> None:
    """Every node is judged by what the target said behind its parent's parent."""
    choose, rounds = Coupling.choose, verify.multi_round
    up = PARENTS.clamp(min=0)

    def of_parent(self: Coupling, logits: Tensor, batch_R: Tensor, depth_R: Tensor) -> Tensor:
        return choose(self, logits.unflatten(0, (-1, len(up)))[:, up].flatten(0, 1), batch_R, depth_R)

    patch.setattr(Coupling, "choose", of_parent)
    patch.setattr(
        verify, "multi_round", lambda parents, tokens, logp, *rest: rounds(parents, tokens, logp[:, up], *rest)
    )


def _noise_of_the_tree(patch: pytest.MonkeyPatch) -> None:
    """Noise is indexed by node instead of by position."""
    right = Coupling.choose

    def choose(self: Coupling, logits: Tensor, batch_R: Tensor, depth_R: Tensor) -> Tensor:
        node_R = torch.arange(len(PARENTS)).repeat(len(batch_R) // len(PARENTS))
        return right(self, logits, batch_R, node_R % (TREE.depth + 1))

    patch.setattr(Coupling, "choose", choose)


BUGS = {
    "no-renormalisation": (_no_renormalisation, ("mss-best", "mss-drawn")),
    "unmasked-bonus": (_unmasked_bonus, ("coupled", "mss-best", "mss-drawn")),
    "reused-coin": (_reused_coin, ("coupled", "mss-best", "mss-drawn")),
    "wrong-parent": (_wrong_parent, ("coupled", "mss-best", "mss-drawn")),
    "noise-of-the-tree": (_noise_of_the_tree, ("coupled",)),
}
"""What is planted, and the samplers that have the place for it."""


@pytest.mark.parametrize(
    ("bug", "sampler"),
    [pytest.param(plant, sampler, id=f"{name}-{sampler}") for name, (plant, hit) in BUGS.items() for sampler in hit],
)
def test_planted_bug_is_seen(
    bug: Callable[[pytest.MonkeyPatch], None], sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    assert _p_value(sampler, "T0.7-p0.9", DRAWS_WITH_BUG) < 1e-6
