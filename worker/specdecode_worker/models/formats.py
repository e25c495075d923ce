"""Storage formats of quantized matrices in checkpoints: the tensors that hold one, and how a device reads its part.

The tensors that are present decide what a matrix is. The lists of modules in ``quantization_config`` are not read,
because every exporter writes another dialect of them. Group sizes and bits follow from shapes. Only what tensors cannot
say comes from the config: whether GPTQ's zero points are stored less one.

Every format becomes `Quantised`, whose numbers are those of the checkpoint. Scales keep their type, because fp16 has
more bits than bf16. Activations are not quantized: scales of activations are skipped.

Sources: AutoGPTQ and GPTQModel (``qlinear/__init__.py``, ``pack``), AutoAWQ (``modules/linear/gemm.py`` and
``utils/packing_utils.py``), compressed-tensors 0.20 (``compressors/*/base.py``), transformers
(``integrations/fbgemm_fp8.py``, ``finegrained_fp8.py``), NVIDIA ModelOpt (``torch/export/quant_utils.py``).

Shape suffixes: N rows (outputs), K columns (inputs), G groups of columns.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_kernels.quantised_linear.reference import GROUPS, Kind, Quantised, dequantise, group_of, pack_int4
from specdecode_worker.models.checkpoint import Checkpoint
from specdecode_worker.models.errors import ConfigMismatch, WeightMismatch
from specdecode_worker.models.fields import Fields, read_optional
from specdecode_worker.models.headers import TensorHeader

Axis = tuple[Literal["rows", "columns"], int]
"""Dimension of a stored tensor, and how many rows or columns of the matrix one entry of it stands for."""
Axes = tuple[Axis, ...]
_DTYPES: dict[str, torch.dtype] = {
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
_SCALES = ("F16", "BF16", "F32")
"""Dtypes of scales."""
_READ_AS = "take it in bf16, in FP8, in NVFP4, or in int4 of GPTQ, AWQ or compressed-tensors"
_METHODS = ("gptq", "awq", "auto-round", "intel/auto-round", "compressed-tensors", "fp8", "fbgemm_fp8", "modelopt")
"""Names in ``quant_method`` whose tensors are read; ``modelopt`` is the beginning of several."""
_SPARE = (
    "input_scale",
    "input_scale_ub",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "k_scale",
    "v_scale",
    "weight_shape",
)
"""Tensors beside a matrix that this project does not need: scales of activations and of KV caches."""
_FOREIGN = {
    "SCB": "bitsandbytes",
    "weight.absmax": "bitsandbytes",
    "weight.quant_map": "bitsandbytes",
    "bitmask": "2:4 sparse",
    "meta": "2:4 sparse",
    "codebooks": "AQLM",
    "W_q": "HQQ",
}
"""Tensors of formats that are not read."""
_SUFFIXES = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_g_idx",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "bias",
    *_SPARE,
    *_FOREIGN,
)
"""Ends of the names of all tensors that may be part of a quantized matrix."""
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of a word that holds each of its eight columns (AutoAWQ's ``AWQ_REVERSE_ORDER``)."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows and columns of a matrix that a device holds."""

    rows: slice
    columns: slice


def quantization_facts(folder: Path, raw: Mapping[str, Any]) -> Fields:
    """Return the quantization config of a model folder; an empty one if it has none.

    Raises:
        ConfigMismatch: The format is not read, or the weights are rotated while the model runs.
    """
    fields = Fields(raw)
    for owner in (fields, fields.part("text_config")):
        for name in ("quantization_config", "compression_config"):
            if owner.raw.get(name):
                return _readable(owner.part(name))
    return _readable(Fields(read_optional(folder / "quantize_config.json"), "quantize_config.json"))


def _readable(facts: Fields) -> Fields:
    method = facts.text("quant_method", "gptq")
    if not method.startswith(_METHODS):
        raise ConfigMismatch(f"{facts.where}: quant_method {method!r} is not read; {_READ_AS}")
    if facts.raw.get("transform_config"):
        raise ConfigMismatch(f"{facts.where}: transform_config rotates activations, which is not supported; {_READ_AS}")
    return facts


def find_matrix(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int], facts: Fields, *, bias: bool = False
) -> StoredMatrix | None:
    """Return the quantized matrix [N, K] whose tensors are ``name``.*, or None if it is plain or absent.

    Args:
        checkpoint: Checkpoint with the tensors.
        name: Name of the matrix in the network, without ``.weight``.
        shape: N and K, by config.json.
        facts: Quantization config of the folder.
        bias: Whether the network has a bias here, which is then not part of the stored matrix.

    Raises:
        WeightMismatch: The tensors are of a format that is not read, or one is missing, misshapen or of a wrong dtype.
    """
    headers = {
        suffix: checkpoint.tensors[tensor]
        for suffix in _SUFFIXES
        if (tensor := f"{name}.{suffix}") in checkpoint and not (bias and suffix == "bias")
    }
    microscaled = {suffix: "MXFP4 or MXFP8" for suffix, header in headers.items() if header.dtype == "U8"}
    foreign = _FOREIGN | (microscaled if "weight_scale" in microscaled else {})
    foreign |= {suffix: "FP8 e5m2" for suffix, header in headers.items() if header.dtype == "F8_E5M2"}
    for suffix, family in foreign.items():
        if suffix in headers:
            raise WeightMismatch(f"{checkpoint.folder}: {name}.{suffix} is of {family}, which is not read; {_READ_AS}")
    for kind in FORMATS:
        if kind.claims(headers, shape):
            return kind(checkpoint, name, shape, headers, facts)
    return None


class StoredMatrix(ABC):
    """Matrix [N, K] of a checkpoint in a quantized format."""

    format: ClassVar[str]
    """Name of the format for users."""
    zeroed: ClassVar[tuple[str, ...]] = ("bias",)
    """Tensors that may be there if they are 0."""
    kind: Kind
    """Kind of the levels."""
    levels: str
    """Tensor that holds the integers or floating-point numbers."""
    scale: str
    """Tensor that holds the scales."""
    zero: str | None = None
    """Tensor that holds the zero points, if there is one."""

    @classmethod
    @abstractmethod
    def claims(cls, headers: Mapping[str, TensorHeader], shape: tuple[int, int]) -> bool:
        """Return whether tensors with these names and dtypes are a matrix of this format."""

    @abstractmethod
    def _layout(self) -> dict[str, Axes]:
        """Set kind and tensors, and return the dimensions of those that are read, of which the first is ``levels``."""

    @abstractmethod
    def _unpacked(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return levels [N, K], scales [N, G] and, if there are any, zero points [N, G] of the slices that were read.

        They start where the first entry of each tensor does, which may be before the first row or column wanted.
        """

    def __init__(
        self,
        checkpoint: Checkpoint,
        name: str,
        shape: tuple[int, int],
        headers: Mapping[str, TensorHeader],
        facts: Fields,
    ) -> None:
        self.checkpoint, self.name, self.headers, self.facts = checkpoint, name, headers, facts
        self.rows, self.columns = shape
        self.axes = self._layout()
        self.claimed = frozenset(f"{name}.{one}" for one in headers if one in self._known)
        for suffix, axes in self.axes.items():
            wanted = tuple(-(-(self.rows if along == "rows" else self.columns) // step) for along, step in axes)
            if axes and self._header(suffix).shape != wanted:
                raise self._wrong(
                    suffix, f"has shape {list(headers[suffix].shape)}, {self.format} needs {list(wanted)}"
                )

    @property
    def has_zeros(self) -> bool:
        """True if the zero points are stored; else the middle integer stands for 0."""
        return self.zero is not None

    @property
    def order(self) -> str | None:
        """Tensor that says of which group each column is, if there is one."""
        return next((suffix for suffix in ("g_idx", "weight_g_idx") if suffix in self.headers), None)

    @property
    def group(self) -> int:
        """Number of columns with one scale."""
        return next((step for along, step in self.axes[self.scale] if along == "columns"), self.columns)

    @property
    def form(self) -> str:
        """Kind, group size, type of scales and order of columns, in words."""
        order = ", act-order" if self.groups_K is not None else ""
        return f"{self.format}: {self.kind} in groups of {self.group}, {self.headers[self.scale].dtype} scales{order}"

    @cached_property
    def groups_K(self) -> Tensor | None:
        """Group of each column, if columns of a group are not neighbors (act-order).

        Raises:
            WeightMismatch: The groups are not of one size.
        """
        if self.order is None or self.group >= self.columns:
            return None
        groups_K = self.checkpoint.read(f"{self.name}.{self.order}").long()
        if torch.equal(groups_K, torch.arange(self.columns) // self.group):
            return None
        count = self.columns // self.group
        if groups_K.min() < 0 or not (groups_K.bincount(minlength=count) == self.group).all():
            raise self._wrong(self.order, f"does not name {self.group} columns for each of {count} groups")
        return groups_K

    def read(self, part: Part, device: torch.device) -> Quantised | Tensor:
        """Return the part that a device holds, on ``device``.

        Some of the columns of a matrix in act-order have groups of many sizes. They are returned as a plain matrix in
        fp32.

        Raises:
            WeightMismatch: The columns cannot be split here, or zero points do not agree with the config.
        """
        columns = part.columns.stop - part.columns.start
        is_part = columns < self.columns
        tensors = self._fetched(part, device)
        levels_NK, scale_NG, zero_NG = self._unpacked(tensors)
        levels_NK = _cut(levels_NK, 1, part.columns, self._step(self.levels, "columns"))
        levels_NK = _cut(levels_NK, 0, part.rows, self._step(self.levels, "rows"))
        scale_NG = _cut(scale_NG, 0, part.rows, self._step(self.scale, "rows"))
        if zero_NG is not None:
            zero_NG = _cut(zero_NG, 0, part.rows, self._step(self.zero, "rows"))
        if self.groups_K is not None and is_part:
            groups_K = self.groups_K[part.columns].to(device)
            zero = 8 if zero_NG is None else zero_NG[:, groups_K].float()
            levels_NK = levels_NK.float() - (zero if self.kind == "int4" else 0)
            return levels_NK * scale_NG[:, groups_K].float()
        order_K = None
        if self.groups_K is not None:
            order_K = self.groups_K.argsort(stable=True).to(device)
            levels_NK = levels_NK[:, order_K]
        group = self._group(part)
        if group < columns:
            scale_NG = self._regrouped(scale_NG, part.columns, group)
            zero_NG = None if zero_NG is None else self._regrouped(zero_NG, part.columns, group)
        if self.kind == "int4":
            padded_NK = F.pad(levels_NK, (0, -columns % group))
            levels_NK = pack_int4(padded_NK.reshape(len(padded_NK), -1, group))
        packed, scale = levels_NK.contiguous(), scale_NG.contiguous()
        scale = scale if self.kind == "int4" else scale.float()
        return Quantised(self.kind, packed, scale, columns, group, zero_NG, order_K)

    def dequantized(self) -> Tensor:
        """Return the whole matrix in fp32."""
        whole = Part(slice(0, self.rows), slice(0, self.columns))
        held = self.read(whole, torch.device("cpu"))
        return dequantise(held) if isinstance(held, Quantised) else held

    def nbytes(self, part: Part, dtype: torch.dtype) -> int:
        """Return the bytes that a part takes on a device that computes with quantized matrices in ``dtype``."""
        rows, columns = (int(span.stop - span.start) for span in (part.rows, part.columns))
        if self.groups_K is not None and columns < self.columns:
            return rows * columns * dtype.itemsize
        group = self._group(part)
        groups = -(-columns // group)
        order = 0 if self.groups_K is None else 8 * columns
        if self.kind != "int4":
            return rows * (columns + 4 * groups) + order
        scale = _DTYPES[self.headers[self.scale].dtype].itemsize
        return rows * groups * (group // 2 + scale + self.has_zeros) + order

    def _fetched(self, part: Part, device: torch.device) -> dict[str, Tensor]:
        """Return the slices of the tensors that hold a part."""
        names = [f"{self.name}.{suffix}" for suffix in (*self.axes, *self.zeroed) if suffix in self.headers]
        start = len(self.name) + 1
        fetched = {}
        for name, tensor in self.checkpoint.read_all(names, lambda at, shape: self._slices(at[start:], shape, part)):
            if name[start:] in self.axes:
                fetched[name[start:]] = tensor.to(device)
            elif tensor.count_nonzero():
                raise self._wrong(name[start:], "is not 0, which is not supported")
        return fetched

    def _slices(self, suffix: str, shape: tuple[int, ...], part: Part) -> tuple[slice, ...]:
        """Return the slices of a tensor that hold a part; all groups of a matrix in act-order."""
        axes = self.axes.get(suffix, ())
        if len(axes) < len(shape):
            return tuple(slice(0, size) for size in shape)
        every = slice(0, self.columns) if self.groups_K is not None and suffix != self.levels else part.columns
        spans = ((part.rows if along == "rows" else every, step) for along, step in axes)
        return tuple(slice(span.start // step, -(-span.stop // step)) for span, step in spans)

    def _group(self, part: Part) -> int:
        """Return the size of the groups of a part: that of the matrix, or one that divides it and begins with it."""
        start, stop = part.columns.start, part.columns.stop
        if self.group >= self.columns:
            return group_of(stop - start) if self.kind == "int4" else stop - start
        common = math.gcd(self.group, start, 0 if stop == self.columns else stop)
        sizes = GROUPS if self.kind == "int4" else (*GROUPS, 16)
        fitting = next((size for size in sizes if common % size == 0), None)
        if fitting is None and common == self.group:
            raise self._wrong(self.scale, f"has groups of {self.group} inputs; multiples of 32 are read, {_READ_AS}")
        if fitting is None:
            raise WeightMismatch(
                f"{self.checkpoint.folder}: {self.name}: groups of {self.group} inputs cannot be split at input "
                f"{start or stop}; take another tensor_parallel_size"
            )
        return fitting

    def _regrouped(self, values_NG: Tensor, columns: slice, group: int) -> Tensor:
        """Return scales or zero points for smaller groups of a part of the columns."""
        count = -(-(columns.stop - columns.start) // group)
        if self.group >= self.columns:
            return values_NG.expand(-1, count).contiguous()
        repeated = values_NG.repeat_interleave(self.group // group, dim=1)
        return repeated.narrow(1, columns.start % self.group // group, count).contiguous()

    def _step(self, suffix: str | None, direction: str) -> int:
        """Return the number of rows or columns that share one entry of a tensor."""
        assert suffix is not None, "the tensor is there"
        whole = self.rows if direction == "rows" else self.columns
        return next((step for along, step in self.axes[suffix] if along == direction), whole)

    def _header(self, suffix: str, *dtypes: str) -> TensorHeader:
        """Return the header of a tensor, which must be there, of one of ``dtypes`` if any are given."""
        if suffix not in self.headers:
            raise self._wrong(suffix, "is missing")
        header = self.headers[suffix]
        if header.dtype not in (dtypes or _DTYPES):
            raise self._wrong(suffix, f"has dtype {header.dtype}, expected {' or '.join(dtypes or _DTYPES)}")
        return header

    def _step_of(self, whole: int, count: int, what: str) -> int:
        """Return the step of an axis with ``count`` entries for ``whole`` rows or columns."""
        if count == 1:
            return whole
        if whole % count == 0 and (step := whole // count).bit_count() == 1:
            return step
        step = next((2**power for power in range(14) if -(-whole // 2**power) == count), 0)
        if not step:
            raise self._wrong(self.scale, f"has {count} entries for {whole} {what}; groups are powers of 2")
        return step

    @property
    def _known(self) -> frozenset[str]:
        return frozenset((*_SPARE, *self.axes, *self.zeroed, self.order or self.levels))

    def _wrong(self, suffix: str, problem: str) -> WeightMismatch:
        return WeightMismatch(f"{self.checkpoint.folder}: {self.name}.{suffix} {problem}")


class _Integers(StoredMatrix):
    """Matrix of integers that are packed in words of 32 bits."""

    bits: int
    """Bits of an integer."""

    def _integers_per_word(self) -> int:
        """Set bits and kind of the integers, and return how many are in a word."""
        self.bits = 32 * math.prod(self._header(self.levels, "I32").shape) // (self.rows * self.columns)
        if self.bits not in (4, 8):
            raise self._wrong(self.levels, f"has integers of {self.bits} bits; 4 and 8 are read, {_READ_AS}")
        if self.bits == 8 and self.zero is not None and self.has_zeros:
            raise self._wrong(self.zero, "is of 8 bits; int8 is read without zero points, export with symmetric scales")
        self.kind = "int4" if self.bits == 4 else "int8"
        return 32 // self.bits

    def _signed(self, levels: Tensor) -> Tensor:
        """Return integers of 8 bits, which are stored plus 128, as int8; those of 4 bits stay as they are."""
        return levels if self.kind == "int4" else (levels ^ 128).view(torch.int8)


class _Transposed(_Integers):
    """Integers [K, N] with scales [G, N] and zero points [G, N / 8]."""

    levels, scale, zero = "qweight", "scales", "qzeros"
    columns_in_words: ClassVar[bool]
    """Whether a word holds integers of several columns, else of several rows."""

    def _layout(self) -> dict[str, Axes]:
        words = self._integers_per_word()
        group = self._step_of(self.columns, self._header("scales", *_SCALES).shape[0], "columns")
        self._header("qzeros", "I32")
        columns, rows = (words, 1) if self.columns_in_words else (1, words)
        return {
            "qweight": (("columns", columns), ("rows", rows)),
            "scales": (("columns", group), ("rows", 1)),
            "qzeros": (("columns", group), ("rows", words)),
        }


class Gptq(_Transposed):
    """Words along columns, [K / 8, N]; zero points less one in the first version of the format."""

    format, columns_in_words = "GPTQ", True

    @classmethod
    def claims(cls, headers: Mapping[str, TensorHeader], shape: tuple[int, int]) -> bool:
        return "qweight" in headers and headers["qweight"].shape[1:] == (shape[0],)

    @property
    def has_zeros(self) -> bool:
        return not self.facts.flag("sym", True)

    def _unpacked(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        levels_NK = self._signed(_integers(tensors["qweight"].T, self.bits))
        return levels_NK, tensors["scales"].T, self._zeros(tensors["qzeros"])

    def _zeros(self, words: Tensor) -> Tensor | None:
        """Return the zero points [N, G], None if each is the middle.

        For symmetric scales the words decide: files of either version say they are of the first.
        """
        if not self.has_zeros:
            middle = 0x88888888 if self.bits == 4 else 0x80808080
            lowest = 0x11111111 if self.bits == 4 else 0x01010101
            if not any((words == value - 2**32 * (value >= 2**31)).all() for value in (middle, middle - lowest)):
                raise self._wrong("qzeros", "has zero points, but the config says sym; correct `sym` in it")
            return None
        if "v2" in self.facts.text("checkpoint_format", "") + self.facts.text("packing_format", ""):
            return _integers(words, 4).T.contiguous()
        if (words < 0).logical_and(words >> 24 == -1).any():
            raise self._wrong(
                "qzeros", "has zero points of -1, whose neighbors are lost; export with checkpoint_format gptq_v2"
            )
        return (_integers(words, 4) + 1 & 15).T.contiguous()


class Awq(_Transposed):
    """Words along rows, [K, N / 8], with columns of a word in the order 0, 2, 4, 6, 1, 3, 5, 7."""

    format, columns_in_words = "AWQ", False

    @classmethod
    def claims(cls, headers: Mapping[str, TensorHeader], shape: tuple[int, int]) -> bool:
        return "qweight" in headers

    def _unpacked(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        levels_NK, zero_NG = (self._in_order(tensors[suffix]) for suffix in ("qweight", "qzeros"))
        return levels_NK, tensors["scales"].T, zero_NG

    def _in_order(self, words: Tensor) -> Tensor:
        places = torch.tensor(_AWQ_PLACES, device=words.device)
        return _integers(words, 4).reshape(len(words), -1, 8)[..., places].flatten(1).T.contiguous()


class PackedIntegers(_Integers):
    """compressed-tensors' pack-quantized: words along columns, [N, K / 8], of integers plus 8."""

    format, levels, scale = "compressed-tensors pack-quantized", "weight_packed", "weight_scale"

    @classmethod
    def claims(cls, headers: Mapping[str, TensorHeader], shape: tuple[int, int]) -> bool:
        return "weight_packed" in headers and headers["weight_packed"].dtype == "I32"

    def _layout(self) -> dict[str, Axes]:
        self.zero = "weight_zero_point" if "weight_zero_point" in self.headers else None
        words, shape = self._integers_per_word(), self._header("weight_scale", *_SCALES).shape
        scale: Axes = ()
        if len(shape) == 2:
            scale = (("rows", 1), ("columns", self._step_of(self.columns, shape[1], "columns")))
        axes: dict[str, Axes] = {"weight_packed": (("rows", 1), ("columns", words)), "weight_scale": scale}
        if self.zero is not None:
            self._header(self.zero, "I32")
            axes[self.zero] = (("rows", words), *scale[1:])
        return axes

    def _unpacked(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        levels_NK = self._signed(_integers(tensors["weight_packed"], self.bits))
        scale_NG = tensors["weight_scale"]
        if scale_NG.dim() < 2:
            scale_NG = scale_NG.reshape(1, 1).expand(self.rows, 1)
        zero_NG = None if self.zero is None else _integers(tensors[self.zero].T, 4).T.contiguous()
        return levels_NK, scale_NG, zero_NG


class ScaledNumbers(StoredMatrix):
    """Numbers of 8 bits with scales of the matrix, of rows, or of blocks, whichever their shape fits.

    compressed-tensors, ModelOpt and FBGEMM name them ``weight_scale``, and DeepSeek's exporter ``weight_scale_inv``,
    which is multiplied all the same.
    """

    format, levels = "FP8 or INT8", "weight"
    zeroed = ("bias", "weight_zero_point")

    @classmethod
    def claims(cls, headers: Mapping[str, TensorHeader], shape: tuple[int, int]) -> bool:
        return "weight" in headers and headers["weight"].dtype in ("F8_E4M3", "I8")

    def _layout(self) -> dict[str, Axes]:
        self.kind = "int8" if self.headers["weight"].dtype == "I8" else "fp8"
        self.scale = "weight_scale_inv" if "weight_scale_inv" in self.headers else "weight_scale"
        shape, scale = self._header(self.scale, *_SCALES).shape, list[Axis]()
        if math.prod(shape) > 1:
            scale.append(("rows", self._step_of(self.rows, shape[0], "rows")))
        if scale and len(shape) > 1:
            scale.append(("columns", self._step_of(self.columns, shape[1], "columns")))
        return {"weight": (("rows", 1), ("columns", 1)), self.scale: tuple(scale)}

    def _unpacked(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        scale_NG = tensors[self.scale].float()
        scale_NG = scale_NG.reshape(len(scale_NG), -1) if self.axes[self.scale] else scale_NG.reshape(1, 1)
        return tensors["weight"], scale_NG.repeat_interleave(self._step(self.scale, "rows"), dim=0), None


class Nvfp4(StoredMatrix):
    """Numbers of 4 bits (e2m1), two to a byte, with fp8 scales of 16 columns and one of the matrix.

    compressed-tensors' scale of the matrix divides (``weight_global_scale``), ModelOpt's multiplies
    (``weight_scale_2``). The numbers are held as fp8, in which they are exact: a byte each.
    """

    format, scale = "NVFP4", "weight_scale"
    whole: str
    """Tensor that holds the scale of the matrix."""

    @classmethod
    def claims(cls, headers: Mapping[str, TensorHeader], shape: tuple[int, int]) -> bool:
        packed = headers.get("weight_packed") or headers.get("weight")
        return packed is not None and packed.dtype == "U8"

    def _layout(self) -> dict[str, Axes]:
        self.kind = "fp8"
        self.levels = "weight_packed" if "weight_packed" in self.headers else "weight"
        self.whole = "weight_global_scale" if "weight_global_scale" in self.headers else "weight_scale_2"
        self._header("weight_scale", "F8_E4M3")
        if math.prod(self._header(self.whole, "F32").shape) != 1:
            raise self._wrong(self.whole, "is not one number")
        return {
            self.levels: (("rows", 1), ("columns", 2)),
            "weight_scale": (("rows", 1), ("columns", 16)),
            self.whole: (),
        }

    def _unpacked(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        codes_NK = _integers(tensors[self.levels], 4)
        size_NK = codes_NK & 7
        bits_NK = torch.where(size_NK > 1, (size_NK << 2) + 48, size_NK * 48) | (codes_NK & 8) << 4
        scale_NG, whole = tensors["weight_scale"].float(), tensors[self.whole].reshape(())
        scale_NG = scale_NG / whole if self.whole == "weight_global_scale" else scale_NG * whole
        return bits_NK.view(torch.float8_e4m3fn), scale_NG, None


FORMATS: tuple[type[StoredMatrix], ...] = (PackedIntegers, Gptq, Awq, Nvfp4, ScaledNumbers)
"""Formats by precedence. A new one is a class here."""


def _integers(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers of words of 32 bits, along the last dimension, lowest bits first, as uint8."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def _cut(values: Tensor, dim: int, span: slice, step: int) -> Tensor:
    """Return the rows or columns ``span`` of values that begin at the entry in which the span begins."""
    return values.narrow(dim, span.start % step, span.stop - span.start)
