"""Static tables of the optional parts of a step: biased and blocked tokens, penalties, and rows of grammar masks.

The values of rows that use none of them change no logit: a bias of 0, a token that is not blocked, penalties of 0 or 1,
and mask 0, which allows all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdecode_worker.engine.graphs.graph_key import GraphKey
from specdecode_worker.engine.graphs.static_inputs import Layout, Shapes, StagedTensor
from specdecode_worker.engine.request import Request
from specdecode_worker.speculation.sampling.params import SamplingParams

N = TypeVar("N", int, float)

WIDTHS = (8, 64, 512)
"""Numbers of biased or blocked tokens of a request that tables have columns for."""
PENALTIES = {"repetition": 1.0, "frequency": 0.0, "presence": 0.0}
"""Neutral values of the penalties."""


@dataclass(frozen=True, slots=True)
class HostMasks:
    """Grammar masks of a step on the host. ``rows`` is the mask of every packed token; mask 0 allows all tokens."""

    rows: list[int]
    table_NW: NDArray[np.uint32]


class MaskTable:
    """Table of grammar masks on the device [N, W]. The first mask allows all tokens."""

    def __init__(self, masks: int, vocab_size: int, device: torch.device) -> None:
        self._words = (vocab_size + 31) // 32
        self._staged = StagedTensor(Layout({"masks": (masks, self._words)}), torch.int32, device)
        self.view()[0].fill_(-1)

    def view(self) -> Tensor:
        """Return the table as captured steps read it."""
        return self._staged.views()["masks"]

    def write(self, table_NW: NDArray[np.uint32]) -> None:
        """Queue the copy of the masks of a step to the first rows of the table."""
        self._staged.write(torch.from_numpy(table_NW.view(np.int32)).flatten())


def width_of(params: SamplingParams) -> int:
    """Return the number of columns that the request needs in the tables of biased and blocked tokens."""
    return max(len(params.logit_bias), len(params.blocked) if params.blocks else 0)


def int_shapes(key: GraphKey) -> Shapes:
    """Return the shapes of the integer tables that the features of ``key`` need, by name; row B is padding.

    ``prompt_tokens``, ``min_tokens``: [B + 1]; ``bias_ids``, ``blocked_ids``: [B + 1, K].
    """
    shapes: dict[str, tuple[int, ...]] = {}
    if key.features.adjusts:
        shapes |= dict.fromkeys(("prompt_tokens", "min_tokens"), (key.rows + 1,))
        shapes |= dict.fromkeys(("bias_ids", "blocked_ids"), (key.rows + 1, key.features.adjusts))
    return shapes


def float_shapes(key: GraphKey) -> Shapes:
    """Return the shapes of the float tables that the features of ``key`` need, by name; row B is padding."""
    if not key.features.adjusts:
        return {}
    return {"bias": (key.rows + 1, key.features.adjusts), **dict.fromkeys(PENALTIES, (key.rows + 1,))}


def ints_of(requests: Sequence[Request], key: GraphKey) -> dict[str, list[int]]:
    """Return the values of the integer tables, flat and padded."""
    tables: dict[str, list[int]] = {}
    if width := key.features.adjusts:
        batch = [request.sampling_params for request in requests]
        more = key.rows + 1 - len(batch)
        tables["prompt_tokens"] = [params.prompt_tokens for params in batch] + [0] * more
        tables["min_tokens"] = [params.min_tokens if params.blocks else 0 for params in batch] + [0] * more
        bias = [[token for token, _ in params.logit_bias] for params in batch]
        tables["bias_ids"] = _flat(bias, key, width, 0)
        # A token that is blocked must not occur once more as a free one, so rows repeat one of their own.
        blocked = [_repeated(params.blocked, width) if params.blocks else [] for params in batch]
        tables["blocked_ids"] = _flat(blocked, key, width, 0)
    return tables


def floats_of(requests: Sequence[Request], key: GraphKey) -> dict[str, list[float]]:
    """Return the values of the float tables, flat and padded."""
    if not key.features.adjusts:
        return {}
    batch = [request.sampling_params for request in requests]
    more = key.rows + 1 - len(batch)
    bias = [[value for _, value in params.logit_bias] for params in batch]
    return {
        "bias": _flat(bias, key, key.features.adjusts, 0.0),
        "repetition": [params.repetition_penalty for params in batch] + [PENALTIES["repetition"]] * more,
        "frequency": [params.frequency_penalty for params in batch] + [PENALTIES["frequency"]] * more,
        "presence": [params.presence_penalty for params in batch] + [PENALTIES["presence"]] * more,
    }


def _repeated(tokens: Sequence[int], width: int) -> list[int]:
    return list(tokens) + list(tokens[:1]) * (width - len(tokens))


def _flat(rows: Sequence[Sequence[N]], key: GraphKey, width: int, padding: N) -> list[N]:
    """Return the rows one after the other, each padded to ``width``, and rows of padding up to B + 1."""
    values: list[N] = []
    for row in rows:
        values += row
        values += [padding] * (width - len(row))
    return values + [padding] * (width * (key.rows + 1 - len(rows)))
