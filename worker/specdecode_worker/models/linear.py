"""The matrix of all networks: how it is stored, which part of it this device holds, and the product that serves it.

A matrix is built plain, with the names and shapes of its checkpoint. Before a network serves, its matrices may be
quantized, joined with others that read the same input, and packed for the processor; after each of these, and on any
number of devices, a network calls them in the same way.

Several devices split a matrix after Megatron-LM's scheme (Shoeybi et al., arXiv 1909.08053): by output features where
each device goes on with its own heads or channels, by input features where their results are summed, and by vocabulary
where the first device gathers the logits, because it chooses the tokens.

Shape suffixes: T rows, K input features, N output features, E hidden size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdecode_kernels import dispatch
from specdecode_kernels.cpu import matrix
from specdecode_kernels.cpu import ops as compiled
from specdecode_kernels.cpu.native import library
from specdecode_kernels.grouped_linear.op import fits as fits_grouped
from specdecode_kernels.grouped_linear.op import grouped_linear
from specdecode_kernels.grouped_linear.reference import Groups
from specdecode_kernels.quantised_linear.op import linear as quantised_linear
from specdecode_kernels.quantised_linear.reference import ZERO, Kind, Quantised, dequantise, quantise
from specdecode_kernels.silu_mul.op import silu_mul
from specdecode_kernels.small_linear.op import fits, small_linear
from specdecode_worker.models import collectives
from specdecode_worker.models.formats import Part, StoredMatrix


class Split(Enum):
    """How the devices of a replica share a matrix."""

    WHOLE = "whole"
    """Each device has all of it."""
    OUTPUTS = "outputs"
    """Each device computes its own output features, with their biases."""
    INPUTS = "inputs"
    """Each device multiplies its own input features; the results are summed, and the first device adds the bias."""
    VOCABULARY = "vocabulary"
    """Each device computes its own tokens' logits; the first device gets all [T, V], the others [T, 0]."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Position of one device among ``size`` devices."""

    rank: int
    size: int

    def part(self, count: int) -> slice:
        """Return this device's slice of ``count`` entries.

        Slices have equal width; the last ones are shorter if ``count`` is not divisible.
        """
        width = -(-count // self.size)
        return slice(min(self.rank * width, count), min((self.rank + 1) * width, count))


class StoredWeight(nn.Module):
    """Weight and bias of a matrix in another format than plain tensors."""

    @abstractmethod
    def product(self, x_TK: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias`` [..., N] for inputs [..., K]."""


class Linear(nn.Linear):
    """Matrix of a network. ``weight`` [N, K] and ``bias`` are there until they are stored in another format."""

    stored: StoredWeight | None
    """Weight and bias in another format; the plain ones are then released."""
    shard: Shard | None
    """This device among those that share the matrix, once they do."""
    source: StoredMatrix | None
    """Tensors of the checkpoint that hold this matrix in a quantized format, until it is loaded."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, split: Split = Split.WHOLE) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.stored, self.shard, self.source, self.split = None, None, None, split
        self._outputs = out_features  # of all devices together

    @classmethod
    def of(cls, weight_NK: Tensor, bias_N: Tensor | None = None, *, split: Split = Split.WHOLE) -> Self:
        """Return a matrix with these values; they are not copied."""
        made = cls._empty(weight_NK.shape[1], weight_NK.shape[0], split)
        made.weight = nn.Parameter(weight_NK.detach(), requires_grad=False)
        if bias_N is not None:
            made.bias = nn.Parameter(bias_N.detach(), requires_grad=False)
        return made

    @classmethod
    def joined(cls, parts: Iterable[Linear]) -> Self:
        """Return one matrix for several that read the same input; this is exact.

        Parts that are stored alike become one product; others are still multiplied one by one.
        """
        first, *others = parts = tuple(parts)
        assert all((part.split, part.shard) == (first.split, first.shard) for part in others)
        if all(part.stored is None for part in parts):
            made = cls.of(*_stacked([(part.weight, part.bias) for part in parts]), split=first.split)
        else:
            made = cls._empty(first.in_features, sum(part.out_features for part in parts), first.split)
            made._store(QuantizedWeight.joined([part.stored for part in parts]) or SeparateWeights(parts))
        made.shard = first.shard
        return made

    @classmethod
    def _empty(cls, in_features: int, out_features: int, split: Split) -> Self:
        with torch.device("meta"):
            return cls(in_features, out_features, split=split)

    if TYPE_CHECKING:

        def __call__(self, x_TK: Tensor) -> Tensor: ...

    @property
    def is_plain(self) -> bool:
        """Whether this is a plain matrix, all of which this device has."""
        return self.stored is None and self.shard is None

    def share(self, shard: Shard, outputs: int) -> None:
        """Take part in the collectives of all devices that share this matrix; it holds this device's part.

        Args:
            shard: This device among them.
            outputs: Output features of the whole matrix.
        """
        if self.split is not Split.WHOLE:
            self.shard, self._outputs = shard, outputs

    def part(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the part of the weight or bias of all devices together, of this shape, that this device holds."""
        rows, *columns = (slice(0, size) for size in shape)
        if self.shard is not None and self.split is Split.INPUTS:
            columns = [self.shard.part(size) for size in shape[1:]]
        elif self.shard is not None:
            # devices share a part where there are fewer key-value heads than devices
            parts = -(-shape[0] // self.out_features) if self.split is Split.OUTPUTS else self.shard.size
            rows = Shard(self.shard.rank * parts // self.shard.size, parts).part(shape[0])
        return rows, *columns

    def load(self, dtype: torch.dtype, device: torch.device, *, stored: bool) -> None:
        """Load this device's part of a matrix that is quantized in its checkpoint, if it is.

        The bias must be loaded before, and the matrix shared.

        Args:
            dtype: Type of the weight unless it stays quantized.
            device: Device that holds it.
            stored: Whether it stays in its format; else it is dequantized.

        Raises:
            WeightMismatch: The matrix cannot be split here, or its tensors contradict each other.
        """
        if self.source is None:
            return
        part = Part(*self.part((self.source.rows, self.source.columns)))
        weight, self.source = self.source.read(part, device), None
        if stored and self._stays and isinstance(weight, Quantised):
            self._store(QuantizedWeight(weight, self._own_bias))
        else:
            plain = dequantise(weight, dtype) if isinstance(weight, Quantised) else weight.to(dtype)
            self.weight = nn.Parameter(plain, requires_grad=False)

    def nbytes_saved(self, dtype: torch.dtype) -> int:
        """Return the bytes that the weight takes less than in ``dtype`` if it stays as its checkpoint has it."""
        if self.source is None or not self._stays:
            return 0
        rows, columns = self.weight.shape  # of the first device, which has the largest part
        return self.weight.numel() * dtype.itemsize - self.source.nbytes(Part(slice(0, rows), slice(0, columns)), dtype)

    @property
    def form(self) -> str:
        """Format of the matrix in its checkpoint: matrices of the same one can be joined."""
        return "plain numbers" if self.source is None else self.source.form

    @property
    def _stays(self) -> bool:
        """True unless this is the output matrix, which drafts and training read and which is therefore dequantized."""
        return self.split is not Split.VOCABULARY

    def quantize(self, kind: Kind, device: torch.device, *, stored: bool) -> Linear:
        """Return this matrix on ``device`` with quantized weights, in that format or, unless ``stored``, rounded to it.

        The plain weight stays as it is, because embeddings may be tied to it.
        """
        weight = quantise(self.weight.to(device), kind)
        if stored:
            made = self._empty(weight.columns, weight.rows, self.split)
            made._store(QuantizedWeight(weight, self._own_bias))
        else:
            made = self.of(dequantise(weight, self.weight.dtype), self.bias, split=self.split)
        made.shard, made._outputs = self.shard, self._outputs
        return made

    def pack(self) -> None:
        """Store a plain matrix in bf16 on a CPU as its compiled kernels read it, or else as oneDNN does."""
        if self.stored is None:
            form = CompiledWeight if runs_compiled(self.weight) else OneDnnWeight
            self._store(form(self.weight, self._own_bias))

    def few(self, x_TK: Tensor) -> bool:
        """Return whether the kernel for few rows serves this product."""
        return self.stored is None and fits(x_TK, self.weight)

    def forward(self, x_TK: Tensor) -> Tensor:
        """Return the product [..., N] with the bias, combined over the devices that share the matrix."""
        own_TN = self.own(x_TK)
        if self.shard is not None and self.split is Split.VOCABULARY:
            return self._gathered(own_TN, self.shard)
        return self.combined(own_TN)

    @property
    def is_groupable(self) -> bool:
        """Whether `grouped` serves matrices like this one."""
        if self.stored is None:
            return getattr(self, "bias", None) is None and fits_grouped(self.weight)
        return isinstance(self.stored, QuantizedWeight) and self.stored.bias is None and fits_grouped(self.stored.held)

    def grouped(
        self,
        x_TK: Tensor,
        groups: Groups,
        *,
        scored: bool = False,
        gated: bool = False,
        residual_TN: Tensor | None = None,
    ) -> Tensor:
        """Return this device's part of the product of each row with the matrix of its expert.

        This matrix is that of all experts, one above the other.
        """
        matrices = self.weight if self.stored is None else cast(QuantizedWeight, self.stored).held
        return grouped_linear(x_TK, matrices, groups, scored=scored, gated=gated, residual_TN=residual_TN)

    def combined(self, own_TN: Tensor) -> Tensor:
        """Return the sum over the devices that share the input features; ``own_TN`` may be overwritten."""
        if self.shard is not None and self.split is Split.INPUTS:
            collectives.all_reduce(own_TN)
        return own_TN

    def reorder(self, order_N: Tensor) -> None:
        """Change the order of the outputs in place: output n is then what ``order_N[n]`` was."""
        if self.stored is not None:
            cast(QuantizedWeight, self.stored).reorder(order_N)
            return
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                parameter.data = parameter.data[order_N.to(parameter.device)]

    def gated(self, x_TK: Tensor) -> Tensor:
        """Return ``SiLU(gate) * up`` [..., N / 2] of the joined matrix of gate and up."""
        if self.few(x_TK):
            return small_linear(x_TK, self.weight, self.bias, gated=True)
        return silu_mul(self(x_TK))

    def plus(self, x_TE: Tensor, inner_TK: Tensor) -> Tensor:
        """Return ``x + linear(inner)``; the first of several devices adds x to its part, before the parts are summed.

        ``x_TE``, which no caller may read again, is overwritten on GPUs.
        """
        added_TE = x_TE if self._adds else None
        if self.few(inner_TK):
            out_TE = small_linear(inner_TK, self.weight, self._own_bias, residual_TN=added_TE)
        elif not self._overwrites(x_TE, inner_TK):
            return x_TE + self(inner_TK)
        elif added_TE is None:
            out_TE = self.own(inner_TK)
        else:
            out_TE = added_TE.addmm_(inner_TK, self.weight.t())
        return self.combined(out_TE)

    @property
    def _adds(self) -> bool:
        """Whether this device adds what is added once, however many devices there are."""
        return self.shard is None or self.shard.rank == 0

    @property
    def _own_bias(self) -> Tensor | None:
        return self.bias if self._adds or self.split is not Split.INPUTS else None

    def _overwrites(self, x_TE: Tensor, inner_TK: Tensor) -> bool:
        if self.stored is not None or getattr(self, "bias", None) is not None or x_TE.dim() != 2:
            return False
        return dispatch.on_gpu(x_TE) and not dispatch.learns(x_TE, inner_TK, self.weight)

    def own(self, x_TK: Tensor) -> Tensor:
        """Return this device's part of the product, for `combined`."""
        if self.stored is not None:
            return self.stored.product(x_TK)
        if fits(x_TK, self.weight):
            return small_linear(x_TK, self.weight, self._own_bias)
        return F.linear(x_TK, self.weight, self._own_bias)

    def _gathered(self, own_TN: Tensor, shard: Shard) -> Tensor:
        width = -(-self._outputs // shard.size)
        if own_TN.shape[-1] < width:  # the last device may have a shorter part
            own_TN = F.pad(own_TN, (0, width - own_TN.shape[-1]))
        own_TN = own_TN.contiguous()
        if shard.rank:
            collectives.send_to_first(own_TN)
            return own_TN[:, :0]
        gathered_DTN = collectives.gather(own_TN, shard.size)
        return gathered_DTN.transpose(0, 1).reshape(len(own_TN), -1)[:, : self._outputs]

    def _store(self, weight: StoredWeight) -> None:
        self.stored = weight
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)


class QuantizedWeight(StoredWeight):
    """Weight of int4, int8 or fp8 numbers with their scales."""

    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    order: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: Quantised, bias_N: Tensor | None) -> None:
        super().__init__()
        self.kind, self.group, self.columns = weight.kind, weight.group, weight.columns
        self.register_buffer("packed", weight.packed_NB)
        self.register_buffer("scale", weight.scale_NG)
        self.register_buffer("zero", weight.zero_NG)
        self.register_buffer("order", weight.order_K)
        self.register_buffer("bias", None if bias_N is None else bias_N.detach())

    @property
    def held(self) -> Quantised:
        """The numbers and their scales."""
        return Quantised(self.kind, self.packed, self.scale, self.columns, self.group, self.zero, self.order)

    def product(self, x_TK: Tensor) -> Tensor:
        out_TN = quantised_linear(x_TK.reshape(-1, self.columns), self.held, self.bias)
        return out_TN.reshape(*x_TK.shape[:-1], -1)

    @classmethod
    def joined(cls, parts: Sequence[StoredWeight | None]) -> QuantizedWeight | None:
        """Return one weight with the rows of all, or None if their formats or column orders differ."""
        alike = [part for part in parts if isinstance(part, cls)]
        if len(alike) < len(parts) or not all(alike[0]._is_like(part) for part in alike):
            return None
        first = alike[0]
        packed, bias = _stacked([(part.packed, part.bias) for part in alike])
        scale, zero = torch.cat([part.scale for part in alike]), None
        if any(part.zero is not None for part in alike):
            zero = torch.cat([part._zeros for part in alike])
        return cls(Quantised(first.kind, packed, scale, first.columns, first.group, zero, first.order), bias)

    def reorder(self, order_N: Tensor) -> None:
        """Change the order of the rows, with their scales and biases."""
        order_N = order_N.to(self.packed.device)
        self.packed, self.scale = self.packed[order_N], self.scale[order_N]
        self.zero = None if self.zero is None else self.zero[order_N]
        self.bias = None if self.bias is None else self.bias[order_N]

    def _is_like(self, other: QuantizedWeight) -> bool:
        shape, another = ((one.kind, one.group, one.scale.dtype, one.bias is None) for one in (self, other))
        if self.order is None or other.order is None:
            return shape == another and self.order is other.order
        return shape == another and torch.equal(self.order, other.order)

    @property
    def _zeros(self) -> Tensor:
        return torch.full_like(self.scale, ZERO, dtype=torch.uint8) if self.zero is None else self.zero


class SeparateWeights(StoredWeight):
    """Matrices that read the same input but are stored in different formats, or with columns in different orders."""

    def __init__(self, parts: Iterable[Linear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def product(self, x_TK: Tensor) -> Tensor:
        return torch.cat([part.own(x_TK) for part in cast(Iterable[Linear], self.parts)], dim=-1)


class CompiledWeight(StoredWeight):
    """Weight in the panels of the compiled bf16 kernels for CPUs, which round once and compute each row by itself."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        super().__init__()
        self._run = compiled.Linear(matrix.pack(weight_NK, bias_N))

    def product(self, x_TK: Tensor) -> Tensor:
        return self._run(x_TK)


class OneDnnWeight(StoredWeight):
    """Weight in oneDNN's own layout, without which it would reorder a matrix in every call with several rows."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("packed", torch.ops.mkldnn._reorder_linear_weight(weight_NK.detach(), None))
        self.register_buffer("bias", None if bias_N is None else bias_N.detach())

    def product(self, x_TK: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x_TK, self.packed, self.bias, "none", [], "")
        return result


def runs_compiled(weight: Tensor) -> bool:
    """Return whether the compiled kernels serve this weight: bf16 on a CPU for which they could be compiled."""
    return matrix.packable(weight) and library() is not None


def _stacked(parts: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Return weights and biases one above the other."""
    biases = [bias for _, bias in parts if bias is not None]
    assert len(biases) in (0, len(parts)), "matrices that are joined all have a bias, or none has"
    return torch.cat([weight.detach() for weight, _ in parts]), torch.cat(biases) if biases else None
