"""How sharply to draft where text is sampled: a factor on the draft's logits for every depth.

With coupled sampling the draft proposes the top of log q + g with the target's own noise g. A head trained on soft
targets is flatter than the target where it is unsure, and then follows the noise instead of the target; a factor above
one makes it follow its own opinion. The factor that agrees most often on validation text is kept in calibration.json,
a file beside the weights, so that their format stays everybody's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specdecode_worker.models.eagle3 import Eagle3Head
from specdecode_worker.training.shards import Conversation
from specdecode_worker.training.unroll import make_batch, unroll

FACTORS = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.4, 2.8)
TEMPERATURES = (0.7, 1.0)
_BATCH = 2


@torch.inference_mode()
def agreement(
    head: Eagle3Head, conversations: Sequence[Conversation], output_VE: Tensor, *, depth: int, seed: int = 0
) -> Tensor:
    """[depth, factors] share of slots where target and draft draw the same token from the same noise."""
    generator = torch.Generator().manual_seed(seed)
    hits = torch.zeros(depth, len(FACTORS))
    slots = torch.zeros(depth, 1)
    for start in range(0, len(conversations), _BATCH):
        batch = make_batch(conversations[start : start + _BATCH], output_VE.dtype)
        target_BAV = (batch.final_BAE @ output_VE.T).float()
        noise_BAV = -torch.empty_like(target_BAV).exponential_(generator=generator).log_()
        for k, (state_BAE, rooted_BA) in enumerate(unroll(head, batch, depth)):
            draft_RV, noise_RV = head.logits(state_BAE)[rooted_BA].float(), noise_BAV[rooted_BA]
            for temperature in TEMPERATURES:
                drawn_R = (target_BAV[rooted_BA] / temperature + noise_RV).argmax(dim=-1)
                hits[k] += _hits(draft_RV / temperature, noise_RV[:, head.target_ids], head.target_ids, drawn_R)
                slots[k] += len(drawn_R)
    return hits / slots


def _hits(draft_RV: Tensor, noise_RV: Tensor, target_ids: Tensor, drawn_R: Tensor) -> Tensor:
    proposals = (target_ids[(factor * draft_RV + noise_RV).argmax(dim=-1)] for factor in FACTORS)
    return torch.stack([(proposed_R == drawn_R).sum() for proposed_R in proposals])


def write_calibration(
    head: Eagle3Head, conversations: Sequence[Conversation], output_VE: Tensor, folder: Path, *, depth: int
) -> list[float]:
    """Writes ``folder``/calibration.json; returns the factors by depth."""
    found = agreement(head, conversations, output_VE, depth=depth)
    sharpness = [FACTORS[int(best)] for best in found.argmax(dim=-1)]
    document = {
        "sharpness": sharpness,
        "agreement": [round(float(share), 4) for share in found.max(dim=-1).values],
        "agreement_uncalibrated": [round(float(share), 4) for share in found[:, FACTORS.index(1.0)]],
        "temperatures": list(TEMPERATURES),
    }
    (folder / "calibration.json").write_text(json.dumps(document, indent=2) + "\n")
    return sharpness
