"""Coupled choice: target and draft pick with the same noise, so that drafting cannot be seen in the text.

The noise of a request belongs to the absolute position of the token to be chosen. It is drawn once per step and
position and serves the draft's proposals and the target's choice at every node of that depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_kernels.noise.op import gumbel
from specdecode_kernels.sample.op import processed


@dataclass(frozen=True, slots=True)
class Law:
    """How one request is sampled, as the host knows it. ``temperature`` 0 is greedy."""

    seed: int
    temperature: float
    top_k: int
    top_p: float

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


class Coupling:
    """Choices of one step for a batch. ``root_B`` are the roots' positions (a device tensor: they may lag on the
    host), ``depth`` the deepest node from which a token is chosen."""

    def __init__(self, laws: Sequence[Law], root_B: Tensor, depth: int, vocab_size: int) -> None:
        device = root_B.device
        rows = [b for b, law in enumerate(laws) if not law.greedy]
        self._any, self._all = bool(rows), len(rows) == len(laws)
        if not rows:
            return
        self._truncated = any(law.truncated for law in laws)
        sampled = torch.tensor(rows, device=device)
        self._row_of_B = torch.full((len(laws),), -1, device=device)
        self._row_of_B[sampled] = torch.arange(len(rows), device=device)
        self._temperature = torch.tensor([laws[b].temperature for b in rows], dtype=torch.float32, device=device)
        self._top_k = torch.tensor([laws[b].top_k for b in rows], device=device)
        self._top_p = torch.tensor([laws[b].top_p for b in rows], dtype=torch.float32, device=device)
        seed = torch.tensor([laws[b].seed for b in rows], device=device)
        position = root_B[sampled, None] + 1 + torch.arange(depth + 1, device=device)
        seeds = seed[:, None].expand_as(position)
        noise = gumbel(seeds.flatten(), position.flatten(), vocab_size)
        self._noise_SDV = noise.view(*position.shape, vocab_size)

    def choose(self, logits_RV: Tensor, batch_R: Tensor, depth_R: Tensor) -> Tensor:
        """[R] the tokens that plain decoding emits behind these nodes."""
        chosen_R = logits_RV.argmax(-1)
        if not self._any:
            return chosen_R
        row_R = self._row_of_B[batch_R]
        law_R = row_R.clamp(min=0)
        noisy_R = (self._law(logits_RV, law_R) + self._noise_SDV[law_R, depth_R]).argmax(-1)
        return noisy_R if self._all else torch.where(row_R >= 0, noisy_R, chosen_R)

    def propose(
        self, logits_RV: Tensor, target_ids_V: Tensor | None, batch_R: Tensor, depth_R: Tensor, sharpness: float, k: int
    ) -> Tensor:
        """[R, k] target ids, best first: the top of the draft's logits, plus the target's noise where sampled.

        ``target_ids_V`` maps the draft's vocabulary (None: the same). ``sharpness`` multiplies the draft's logits at
        temperature > 0: it was fitted so that agreement is highest.
        """
        scores = logits_RV
        if self._any:
            row_R = self._row_of_B[batch_R]
            law_R = row_R.clamp(min=0)
            noise = self._noise_SDV[law_R, depth_R]
            noise = noise if target_ids_V is None else noise[:, target_ids_V]
            noisy = self._law(scores * sharpness, law_R) + noise
            scores = noisy if self._all else torch.where((row_R >= 0)[:, None], noisy, scores.to(noisy.dtype))
        best = scores.topk(k, dim=-1).indices
        return best if target_ids_V is None else target_ids_V[best]

    def _law(self, logits_RV: Tensor, row_R: Tensor) -> Tensor:
        return processed(
            logits_RV, self._temperature[row_R], self._top_k[row_R], self._top_p[row_R], truncated=self._truncated
        )
