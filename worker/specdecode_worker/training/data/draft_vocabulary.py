"""Choice of the draft vocabulary: the tokens that minimize the uncovered probability of the worst covered domain.

Tokens are weighted by the probability that the target gives them in its own answers, by domain. This is a better
estimate than the counts of the few sampled tokens. A vocabulary chosen by the mean over domains would drop the tokens
of small domains. Instead, badly covered domains gain weight round by round, until none can improve without another
getting worse (multiplicative weights for a zero-sum game between tokens and domains).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from specdecode_worker.training.data.shards import read_shard

_ROUNDS = 120
_STRENGTH = 8.0
"""Change of the domain weights in the first round, per uncovered probability. Later rounds change them less."""


@torch.inference_mode()
def domain_probabilities(shards: Iterable[Path], output_VE: Tensor, *, every: int = 8) -> dict[str, Tensor]:
    """Return for each domain the target's mean probability of each token, [V], over every ``every``-th answer token."""
    sums: dict[str, Tensor] = {}
    for path in shards:
        for conversation in read_shard(path):
            states_RE = conversation.hidden_NE[conversation.answer_start :: every]
            mass_V = torch.softmax((states_RE.to(output_VE) @ output_VE.T).float(), dim=-1).sum(dim=0).double().cpu()
            sums[conversation.domain] = sums.get(conversation.domain, torch.zeros(())) + mass_V
    return {domain: mass_V / mass_V.sum() for domain, mass_V in sorted(sums.items())}


def choose(probabilities_by_domain: dict[str, Tensor], size: int) -> Tensor:
    """Return ``size`` token ids in ascending order, [size].

    Of the vocabularies of all rounds, it is the one with the least uncovered probability in its worst domain.
    """
    mass_DV = torch.stack(list(probabilities_by_domain.values()))
    weight_D = torch.full((len(mass_DV),), 1 / len(mass_DV), dtype=torch.float64)
    best, least = torch.arange(size), 2.0
    for past in range(_ROUNDS):
        chosen = (weight_D @ mass_DV).topk(size).indices
        lacking_D = 1 - mass_DV[:, chosen].sum(dim=1)
        if float(lacking_D.max()) < least:
            best, least = chosen, float(lacking_D.max())
        weight_D = torch.softmax(weight_D.log() + _STRENGTH / (1 + past) ** 0.5 * lacking_D, dim=0)
    return best.sort().values


def uncovered(probabilities_by_domain: dict[str, Tensor], vocabulary: Tensor) -> dict[str, float]:
    """Return by domain the probability of the tokens outside ``vocabulary``."""
    return {domain: round(1 - float(mass_V[vocabulary].sum()), 4) for domain, mass_V in probabilities_by_domain.items()}
