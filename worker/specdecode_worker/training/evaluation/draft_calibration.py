"""How sharply to draft where text is sampled: a factor on the draft's logits for every depth.

With coupled sampling the draft proposes the top of log q + g with the target's own noise g. A head trained on soft
targets is flatter than the target where it is unsure, and then follows the noise instead of the target; a factor above
one makes it follow its own opinion. The factors that agree most often on validation text are kept in
calibration.json, a file beside the weights, so that their format stays everybody's: by depth for each temperature, and
one by depth for all of them, which is what a worker uses that does not tell temperatures apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdecode_worker.models.checkpoints.draft_weights import Draft
from specdecode_worker.training.artifacts.atomic_files import write_json
from specdecode_worker.training.data.shards import Conversation
from specdecode_worker.training.heads.trainable_drafts import batch_for, deepest, logits_of, unrolled, vocabulary_of

FACTORS = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.4, 2.8)
TEMPERATURES = (0.3, 0.6, 0.8, 1.0)
_POOLED = (0.6, 0.8, 1.0)
"""Temperatures that the common factors are chosen by: at lower ones every factor agrees nearly as often."""
_BATCH = 2


@torch.inference_mode()
def agreement(
    head: Draft, conversations: Sequence[Conversation], output_VE: Tensor, *, depth: int, seed: int = 0
) -> Tensor:
    """[temperatures, depth, factors] share of slots where target and draft draw the same token from the same noise."""
    generator = torch.Generator().manual_seed(seed)
    hits = torch.zeros(len(TEMPERATURES), depth, len(FACTORS))
    slots = torch.zeros(depth, 1)
    vocabulary = vocabulary_of(head, len(output_VE))
    for start in range(0, len(conversations), _BATCH):
        batch = batch_for(head, conversations[start : start + _BATCH], output_VE.dtype)
        target_BAV = (batch.final_BAE @ output_VE.T).float()
        noise_BAV = -torch.empty_like(target_BAV).exponential_(generator=generator).log_()
        for k, (state_BAE, rooted_BA) in enumerate(unrolled(head, batch, depth)):
            draft_RV, noise_RV = logits_of(head, state_BAE[rooted_BA], k).float(), noise_BAV[rooted_BA]
            slots[k] += len(draft_RV)
            for at, temperature in enumerate(TEMPERATURES):
                drawn_R = (target_BAV[rooted_BA] / temperature + noise_RV).argmax(dim=-1)
                hits[at, k] += _hits(draft_RV / temperature, noise_RV[:, vocabulary], vocabulary, drawn_R)
    return hits / slots.clamp(min=1)


def _hits(draft_RV: Tensor, noise_RV: Tensor, target_ids: Tensor, drawn_R: Tensor) -> Tensor:
    proposals = (target_ids[(factor * draft_RV + noise_RV).argmax(dim=-1)] for factor in FACTORS)
    return torch.stack([(proposed_R == drawn_R).sum() for proposed_R in proposals])


def write_calibration(
    head: Draft, conversations: Sequence[Conversation], output_VE: Tensor, folder: Path, *, depth: int
) -> list[float]:
    """Writes ``folder``/calibration.json; returns the common factors by depth."""
    found = agreement(head, conversations, output_VE, depth=deepest(head, depth))
    pooled = found[[TEMPERATURES.index(temperature) for temperature in _POOLED]].mean(dim=0)
    document = {
        **_best(pooled),
        "temperatures": list(_POOLED),
        "by_temperature": {str(t): _best(of_one) for t, of_one in zip(TEMPERATURES, found, strict=True)},
    }
    write_json(folder / "calibration.json", document)
    sharpness: list[float] = document["sharpness"]
    return sharpness


def _best(found_DF: Tensor) -> dict[str, Any]:
    """Of [depth, factors]."""
    return {
        "sharpness": [FACTORS[int(best)] for best in found_DF.argmax(dim=-1)],
        "agreement": [round(float(share), 4) for share in found_DF.max(dim=-1).values],
        "agreement_uncalibrated": [round(float(share), 4) for share in found_DF[:, FACTORS.index(1.0)]],
    }
