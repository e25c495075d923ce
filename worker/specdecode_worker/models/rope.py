"""Rotary position embeddings in the half-split layout of Hugging Face checkpoints, and their frequency scalings.

Sources: transformers' modeling_rope_utils (names and defaults of the fields), YaRN (arXiv 2309.00071), Llama 3.1.
Scalings that change with the length of the text (dynamic, longrope) are refused, because cached keys would become
stale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from specdecode_worker.models.errors import ConfigMismatch
from specdecode_worker.models.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3 scaling: long wavelengths are stretched, short ones are kept, and those between are blended."""

    kind: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Linear scaling: positions are divided by ``factor``."""

    kind: ClassVar[str] = "linear"
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN scaling: low frequencies are stretched, high frequencies are kept.

    Cosines and sines are multiplied by ``attention_factor``.
    """

    kind: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


Scaling = RopeScaling | LinearScaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """Factor by which queries grow with their position, ``1 + scale * log(1 + floor((p + 1) / floor))``.

    It counters the flattening of softmax over long texts in layers without positions (arXiv 2501.19399).
    """

    floor: int
    scale: float

    def of(self, positions_T: Tensor) -> Tensor:
        """Return the factors [T, 1, 1] in fp32."""
        steps_T = torch.floor((positions_T.float() + 1) / self.floor)
        return (torch.log1p(steps_T) * self.scale + 1)[:, None, None]


_ROWS = 2**16
"""Rows of the tables computed at a time. This bounds the fp64 temporaries of long contexts."""
_KINDS = "default, linear, llama3 and yarn are"


def read_rope(fields: Fields, positions: int) -> tuple[float, Scaling | None]:
    """Return ``(theta, scaling)`` from config.json.

    ``positions`` is the value of ``max_position_embeddings``, the default original length of YaRN.

    Raises:
        ConfigMismatch: a field is invalid, or the scaling is not supported.
    """
    # transformers 5 nests all fields in rope_parameters. Earlier versions have rope_theta at the top level, next to
    # rope_scaling.
    nested = fields.part("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    theta = nested.number("rope_theta", fields.number("rope_theta", 10000.0), least=1.001)
    for place in (fields, nested):
        place.refuse("partial_rotary_factor", 1)
    if by_layer := [name for name, value in nested.raw.items() if isinstance(value, dict)]:
        raise ConfigMismatch(f"{nested.where}: {by_layer[0]}: rotary positions that differ by layer are not supported")
    kind = nested.text("rope_type", nested.text("type", "default"))
    match kind:
        case "default":
            nested.refuse("mrope_section")
            return theta, None
        case "linear":
            return theta, LinearScaling(factor=nested.number("factor", least=1))
        case "llama3":
            return theta, _llama3(nested)
        case "yarn":
            return theta, _yarn(nested, positions)
        case _:
            raise ConfigMismatch(f"rope scaling {kind!r} is not supported; {_KINDS}")


def _llama3(fields: Fields) -> RopeScaling:
    scaling = RopeScaling(
        factor=fields.number("factor", least=1),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_position_embeddings=fields.integer("original_max_position_embeddings"),
    )
    if scaling.low_freq_factor > scaling.high_freq_factor:
        raise ConfigMismatch(f"{fields.where}: low_freq_factor must not be above high_freq_factor")
    return scaling


def _yarn(fields: Fields, positions: int) -> YarnScaling:
    factor = fields.number("factor", least=1)
    if fields.has("mscale") and fields.has("mscale_all_dim"):
        growth = _yarn_growth(factor, fields.number("mscale")) / _yarn_growth(factor, fields.number("mscale_all_dim"))
    else:
        growth = _yarn_growth(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=fields.integer("original_max_position_embeddings", positions),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        attention_factor=fields.number("attention_factor", growth),
        truncate=fields.flag("truncate", True),
    )


def _yarn_growth(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


class Rope(nn.Module):
    """Tables of cosines and sines, [positions, D].

    They are computed at construction and never loaded from a checkpoint.
    """

    cos_PD: Tensor
    sin_PD: Tensor

    def __init__(self, head_dim: int, positions: int, theta: float, scaling: Scaling | None) -> None:
        super().__init__()
        # Use the CPU even while a model is built on the meta device: no checkpoint contains these tables.
        frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
        growth = 1.0
        match scaling:
            case RopeScaling():
                frequency = _llama3_scaled(frequency, scaling)
            case LinearScaling():
                frequency = frequency / scaling.factor
            case YarnScaling():
                frequency, growth = _yarn_scaled(frequency, theta, scaling), scaling.attention_factor
        table = torch.empty(2, positions, head_dim, device="cpu")
        for start in range(0, positions, _ROWS):
            rows_P = torch.arange(start, min(start + _ROWS, positions), dtype=torch.float64, device="cpu")
            angle = torch.outer(rows_P, frequency).repeat(1, 2)
            table[0, start : start + _ROWS], table[1, start : start + _ROWS] = (
                angle.cos() * growth,
                angle.sin() * growth,
            )
        self.register_buffer("cos_PD", table[0], persistent=False)
        self.register_buffer("sin_PD", table[1], persistent=False)

    def at(self, positions_T: Tensor, dtype: torch.dtype, factor_T11: Tensor | None = None) -> PassRotations:
        """Return the rotations of the positions [T] for a pass in ``dtype``, with factors of the queries."""
        return PassRotations(self.cos_PD, self.sin_PD, positions_T, dtype, factor_T11)


class PassRotations:
    """Rotations of one pass, shared by all of its layers.

    They are the rows ``positions_T`` of the tables ``cos_PD`` and ``sin_PD``. Queries are also multiplied by
    ``factor_T11``, if there is one.
    """

    def __init__(
        self,
        cos_PD: Tensor,
        sin_PD: Tensor,
        positions_T: Tensor,
        dtype: torch.dtype,
        factor_T11: Tensor | None = None,
    ) -> None:
        self.cos_PD, self.sin_PD, self.positions_T = cos_PD, sin_PD, positions_T
        self._dtype, self._factor_T11 = dtype, factor_T11

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the pass, each [T, 1, D], in the dtype of the model."""
        cos, sin = (table_PD[self.positions_T].unsqueeze(1) for table_PD in (self.cos_PD, self.sin_PD))
        return cos.to(self._dtype), sin.to(self._dtype)

    def rotate(self, x_THD: Tensor) -> Tensor:
        """Return queries or keys [T, heads, D] rotated to their positions."""
        return rotate(x_THD, *self.tables)

    def scaled(self, q_THD: Tensor) -> Tensor:
        """Return queries, rotated or not, multiplied by their factors."""
        return q_THD if self._factor_T11 is None else (q_THD * self._factor_T11).to(q_THD.dtype)


def _llama3_scaled(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # Equal factors are a step, as in transformers.
    keep = ((turns - low) / (high - low)).clamp(0, 1) if high > low else (turns >= low).double()
    return keep * frequency + (1 - keep) * frequency / scaling.factor


def _yarn_scaled(frequency: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Return the frequencies scaled by a linear ramp over dimensions.

    Dimensions up to the one with ``beta_fast`` full turns within the original context length are kept. Dimensions from
    the one with ``beta_slow`` turns on are stretched by ``factor``.
    """
    dims = 2 * len(frequency)

    def dimension(turns: float) -> float:
        return dims * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    span = high - low or 0.001  # as in transformers: a step instead of a division by zero
    stretch = ((torch.arange(len(frequency), dtype=torch.float64, device="cpu") - low) / span).clamp(0, 1)
    return stretch * frequency / scaling.factor + (1 - stretch) * frequency


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x_THD`` rotated by ``cos`` and ``sin`` [T, 1, D], in its own dtype."""
    half = x_THD.shape[-1] // 2
    rotate = torch.cat((-x_THD[..., half:], x_THD[..., :half]), dim=-1)
    return (x_THD * cos + rotate * sin).to(x_THD.dtype)
