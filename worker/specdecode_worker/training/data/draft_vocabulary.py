"""The draft's vocabulary: the tokens that leave the least uncovered in the domain that is covered worst.

Tokens are weighed by the probability that the target gives them in its own answers, per domain: that says far more
than the few tokens that were drawn. A vocabulary by the mean would give a small domain's words away; here domains that
are covered badly count more, round by round, until none can gain without another losing as much (the multiplicative
weights of a zero-sum game between tokens and domains).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from specdecode_worker.training.data.shards import read_shard

_ROUNDS = 120
_STRENGTH = 8.0
"""How strongly the first round moves the weights, by uncovered mass; later ones less and less."""


@torch.inference_mode()
def domain_masses(shards: Iterable[Path], output_VE: Tensor, *, every: int = 8) -> dict[str, Tensor]:
    """For each domain the mean probability [V] that the target gives each token, at every ``every``th of an answer."""
    sums: dict[str, Tensor] = {}
    for path in shards:
        for conversation in read_shard(path):
            states_RE = conversation.hidden_NE[conversation.answer_start :: every]
            mass_V = torch.softmax((states_RE.to(output_VE.dtype) @ output_VE.T).float(), dim=-1).sum(dim=0).double()
            sums[conversation.domain] = sums.get(conversation.domain, torch.zeros(())) + mass_V
    return {domain: mass_V / mass_V.sum() for domain, mass_V in sorted(sums.items())}


def choose(masses: dict[str, Tensor], size: int) -> Tensor:
    """[size] rising token ids; of the vocabularies that were weighed, the one whose worst domain lacks least."""
    mass_DV = torch.stack(list(masses.values()))
    weight_D = torch.full((len(mass_DV),), 1 / len(mass_DV), dtype=torch.float64)
    best, least = torch.arange(size), 2.0
    for past in range(_ROUNDS):
        chosen = (weight_D @ mass_DV).topk(size).indices
        lacking_D = 1 - mass_DV[:, chosen].sum(dim=1)
        if float(lacking_D.max()) < least:
            best, least = chosen, float(lacking_D.max())
        weight_D = torch.softmax(weight_D.log() + _STRENGTH / (1 + past) ** 0.5 * lacking_D, dim=0)
    return best.sort().values


def uncovered(masses: dict[str, Tensor], vocabulary: Tensor) -> dict[str, float]:
    """By domain, the probability of what the draft cannot say."""
    return {domain: round(1 - float(mass_V[vocabulary].sum()), 4) for domain, mass_V in masses.items()}
