"""Calibration of a draft for sampled text: a factor on the draft's logits for every depth.

With coupled sampling the draft proposes the top of log q + g, where g is the target's own noise. A head trained on soft
targets is flatter than the target where it is uncertain, so it follows the noise instead of its own distribution. A
factor above one corrects this. The factors that agree with the target most often on validation text are written to
calibration.json, a file of its own, so that the weights keep their standard format. It holds factors by depth for each
temperature, and common factors by depth for workers that do not distinguish temperatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdecode_worker.models.checkpoints.draft_weights import Draft
from specdecode_worker.models.checkpoints.model_hash import CALIBRATION_FILE
from specdecode_worker.training.artifacts.atomic_files import write_json
from specdecode_worker.training.data.shards import Conversation
from specdecode_worker.training.heads.trainable_drafts import batch_for, logits_of, max_depth, unrolled, vocabulary_of

FACTORS = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.4, 2.8)
TEMPERATURES = (0.3, 0.6, 0.8, 1.0)
_POOLED = (0.6, 0.8, 1.0)
"""Temperatures that select the common factors. At lower temperatures every factor agrees nearly as often."""
_BATCH = 2


@torch.inference_mode()
def agreement(
    head: Draft, conversations: Sequence[Conversation], output_VE: Tensor, *, depth: int, seed: int = 0
) -> Tensor:
    """Return the share of slots where target and draft draw the same token from the same noise.

    The result is [temperatures, depth, factors], in the order of ``TEMPERATURES`` and ``FACTORS``.
    """
    generator = torch.Generator().manual_seed(seed)
    hits = torch.zeros(len(TEMPERATURES), depth, len(FACTORS))
    slots = torch.zeros(depth, 1)
    vocabulary = vocabulary_of(head, len(output_VE))
    for start in range(0, len(conversations), _BATCH):
        batch = batch_for(head, conversations[start : start + _BATCH], output_VE.dtype)
        target_BAV = (batch.final_BAE @ output_VE.T).float()
        # The noise is drawn on the CPU, so that it is the same on every device.
        noise_BAV = -torch.empty(target_BAV.shape).exponential_(generator=generator).log_().to(target_BAV.device)
        for k, (state_BAE, rooted_BA) in enumerate(unrolled(head, batch, depth)):
            draft_RV, noise_RV = logits_of(head, state_BAE[rooted_BA], k).float(), noise_BAV[rooted_BA]
            slots[k] += len(draft_RV)
            for at, temperature in enumerate(TEMPERATURES):
                drawn_R = (target_BAV[rooted_BA] / temperature + noise_RV).argmax(dim=-1)
                hits[at, k] += _hits(draft_RV / temperature, noise_RV[:, vocabulary], vocabulary, drawn_R)
    return hits / slots.clamp(min=1)


def _hits(draft_RV: Tensor, noise_RV: Tensor, target_ids: Tensor, drawn_R: Tensor) -> Tensor:
    """Return the number of rows where the draft proposes ``drawn_R``, for each factor."""
    proposals = (target_ids[(factor * draft_RV + noise_RV).argmax(dim=-1)] for factor in FACTORS)
    return torch.stack([(proposed_R == drawn_R).sum() for proposed_R in proposals]).cpu()


def write_calibration(
    head: Draft, conversations: Sequence[Conversation], output_VE: Tensor, folder: Path, *, depth: int
) -> list[float]:
    """Write ``folder``/calibration.json and return the common factors by depth."""
    agreements = agreement(head, conversations, output_VE, depth=max_depth(head, depth))
    pooled = agreements[[TEMPERATURES.index(temperature) for temperature in _POOLED]].mean(dim=0)
    document = {
        **_best(pooled),
        "temperatures": list(_POOLED),
        "by_temperature": {str(t): _best(of_one) for t, of_one in zip(TEMPERATURES, agreements, strict=True)},
    }
    write_json(folder / CALIBRATION_FILE, document)
    sharpness: list[float] = document["sharpness"]
    return sharpness


def _best(agreement_DF: Tensor) -> dict[str, Any]:
    """Return the best factor and its agreement by depth, from agreements [depth, factors]."""
    return {
        "sharpness": [FACTORS[int(best)] for best in agreement_DF.argmax(dim=-1)],
        "agreement": [round(float(share), 4) for share in agreement_DF.max(dim=-1).values],
        "agreement_uncalibrated": [round(float(share), 4) for share in agreement_DF[:, FACTORS.index(1.0)]],
    }
