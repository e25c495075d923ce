"""Contents of a model folder, read from its safetensors headers: names, shapes and dtypes of tensors.

No weights are loaded. Format: https://huggingface.co/docs/safetensors (eight bytes of length, a JSON header, then the
data).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from specdecode_worker.contract import Method
from specdecode_worker.models.errors import WeightMismatch

_MEDUSA = re.compile(r"(medusa_heads?\.)?(\d+\.\d+|blocks\.\d+|lm_heads\.\d+)\.")

INDEX = "model.safetensors.index.json"
_DTYPE = re.compile(r"BOOL|[UI](8|16|32|64)|F8_E(4M3|5M2|8M0)|B?F16|F32|F64")
"""Dtypes of the safetensors format that are read."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Header of one tensor.

    ``dtype`` is the name in the safetensors format (F32, BF16, I64, BOOL); ``file`` is the file that holds the tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str

    @property
    def is_floating_point(self) -> bool:
        """True for floating-point dtypes."""
        return "F" in self.dtype


def read_tensor_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the headers of all weights of a folder, by their names in the checkpoint.

    The rotary frequencies that old exporters stored (``inv_freq``) are left out.

    Raises:
        WeightMismatch: the folder has no safetensors, a file is truncated or not in the format, or two files hold the
            same tensor.
    """
    headers: dict[str, TensorHeader] = {}
    for path in weight_files(folder):
        for name, header in _headers_of(path):
            if name in headers:
                raise WeightMismatch(f"{folder}: {name} stands in both {headers[name].file} and {path.name}; keep one")
            headers[name] = header
    return {name: tensor for name, tensor in headers.items() if not name.endswith("inv_freq")}


def weight_files(folder: Path) -> list[Path]:
    """Return the files named by the index; without an index, every *.safetensors file.

    Mistral's consolidated copies are skipped.

    Raises:
        WeightMismatch: there is no such file, or the index is invalid.
    """
    if (folder / INDEX).is_file():
        return _indexed(folder)
    paths = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not paths:
        raise WeightMismatch(f"{folder} holds no *.safetensors; other formats are not read, convert them first")
    return paths


def _indexed(folder: Path) -> list[Path]:
    path = folder / INDEX
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightMismatch(f"{path} is no index of safetensors ({type(error).__name__}: {error})") from None
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise WeightMismatch(f"{path}: weight_map must name files of this folder")
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise WeightMismatch(f"{folder}: {absent[0]} is missing, which {INDEX} names ({len(absent)} missing in "
                             "all); copy it again, or delete the index if the weights are in other files")  # fmt: skip
    return [folder / name for name in names]


def _headers_of(path: Path) -> Iterator[tuple[str, TensorHeader]]:
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - a safe_open is no dict
                part = file.get_slice(name)
                if not _DTYPE.fullmatch(dtype := part.get_dtype()):
                    raise WeightMismatch(f"{path}: {name} has dtype {dtype}, which is not supported")
                yield name, TensorHeader(tuple(part.get_shape()), dtype, path.name)
    except (SafetensorError, OSError) as error:
        raise WeightMismatch(f"{path} cannot be read as safetensors: {error}; copy it again") from None


def infer_method(headers: Mapping[str, TensorHeader]) -> Method | None:
    """Return the draft method that the tensor names of a folder belong to, or None if they belong to no known one."""
    names = [name.removeprefix("model.") for name in headers]
    if "mask_hidden" in names:
        return "peagle"
    if "hidden_norm.weight" in names:
        return "dflash"
    if any(name in ("d2t", "t2d") or name.endswith("hidden_norm.weight") for name in names):
        return "eagle3"
    if any(_MEDUSA.match(name) for name in names):
        return "medusa"
    if "fc.weight" in names or "fusion_fc.weight" in names:
        return "eagle"
    return "draft-model" if "embed_tokens.weight" in names else None
