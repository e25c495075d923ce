"""Strict assignment of a checkpoint's tensors to a network, by name: every tensor is used, and none is missing.

The headers are compared first, so a checkpoint can be checked without loading it (`UnloadedNetwork`) and is loaded
only if it fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from specdecode_worker.models.causal_lm import UnitNorm
from specdecode_worker.models.checkpoint import FLOATS, Checkpoint
from specdecode_worker.models.config import Rope
from specdecode_worker.models.errors import WeightMismatch
from specdecode_worker.models.formats import StoredMatrix
from specdecode_worker.models.headers import TensorHeader
from specdecode_worker.models.linear import Linear
from specdecode_worker.stages import stage, staged

Network = TypeVar("Network", bound=nn.Module)


class _MetaInit(TorchFunctionMode):
    """Mode that skips the random initialization of embeddings.

    On the meta device, torch imports its compiler for it, which costs seconds at every start.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        return given["tensor"] if func is nn.init.normal_ else func(*args, **given)


@contextmanager
def meta_init() -> Iterator[None]:
    """Build networks on the meta device inside this context: names and shapes without data."""
    with torch.device("meta"), _MetaInit():
        yield


def place_tables(network: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move the tensors that no checkpoint has, computed on the CPU, to the device of the weights."""
    for child in network.modules():
        if isinstance(child, Rope):
            child.to(device)
        elif isinstance(child, UnitNorm):
            child.to(device, dtype)


@dataclass(frozen=True, slots=True)
class UnloadedNetwork(Generic[Network]):
    """Network on the meta device with the checkpoint that fills it.

    ``given`` names parts of the network that are not filled from the checkpoint. ``spare`` names tensors that the
    checkpoint may hold in addition to the network's.
    """

    network: Network
    checkpoint: Checkpoint
    given: frozenset[str] = frozenset()
    spare: frozenset[str] = frozenset()

    def check(self) -> None:
        """Raise WeightMismatch for the first tensor that is missing, extra, misshapen or of the wrong dtype."""
        folder, headers, origins = self.checkpoint.folder, self.checkpoint.tensors, self.checkpoint.origins
        quantized = self.quantized
        named = {name: tensor for name, tensor in self.network.state_dict().items() if name not in self.given}
        wanted = {name: tensor for name, tensor in named.items() if name.removesuffix(".weight") not in quantized}
        if missing := sorted(wanted.keys() - headers.keys()):
            raise WeightMismatch(f"{folder}: {missing[0]} is missing ({len(missing)} missing in all)")
        if extra := sorted(origins[name] for name in self._plain_names - wanted.keys()):
            raise WeightMismatch(f"{folder}: {extra[0]} is not part of this model ({len(extra)} extra in all)")
        for name, tensor in wanted.items():
            _expect(folder, origins[name], headers[name], tensor)

    @property
    def quantized(self) -> dict[str, StoredMatrix]:
        """Matrices that the checkpoint holds in a quantized format, by the names of their modules."""
        modules = self.network.named_modules()
        return {name: one.source for name, one in modules if isinstance(one, Linear) and one.source is not None}

    @property
    def _plain_names(self) -> frozenset[str]:
        """Names of the tensors that are parameters of the network as they are."""
        claimed = frozenset[str]().union(*(matrix.claimed for matrix in self.quantized.values()))
        return frozenset(self.checkpoint.tensors.keys() - self.spare - claimed)

    def read_weight(self, name: str) -> Tensor:
        """Return the weight of the matrix ``name``, dequantized in fp32 if it is quantized."""
        matrix = self.quantized.get(name)
        return self.checkpoint.read(f"{name}.weight") if matrix is None else matrix.dequantized()

    def fill(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        finite: bool = False,
        stored: bool | None = None,
        own: Network | None = None,
    ) -> Network:
        """Load the weights and return the frozen network in ``dtype`` on ``device``.

        Args:
            dtype: Type of plain weights.
            device: Device of the network.
            finite: Whether plain weights with NaN or infinity are refused.
            stored: Whether quantized matrices stay quantized; None lets them on a GPU only, because a CPU has layouts
                of its own. Their values are the same.
            own: This device's part of the network, which is filled in its place.

        Raises:
            WeightMismatch: a tensor does not fit, or holds NaN or infinity and ``finite`` is set.
        """
        self.check()
        network = own or self.network
        placed: dict[str, Tensor] = {}
        part = None if own is None else partial(_part, own)
        for name, tensor in staged("read", self.checkpoint.read_all(self._plain_names, part)):
            _touch(tensor)
            with stage("place"):
                whole = torch.bool if tensor.dtype == torch.bool else torch.int64
                wanted = dtype if tensor.is_floating_point() else whole
                placed[name] = tensor.to(device=device, dtype=wanted).contiguous()
        if finite:
            self._check_finite(placed)
        network.load_state_dict(placed, strict=False, assign=True)
        for module in network.modules():
            if isinstance(module, Linear):
                module.load(dtype, device, stored=device.type == "cuda" if stored is None else stored)
        network.requires_grad_(False)
        place_tables(network, device, dtype)
        return network

    def _check_finite(self, placed: Mapping[str, Tensor]) -> None:
        """Raise WeightMismatch for the first tensor with NaN or infinity, by one reduction per tensor on its device."""
        floats = {name: tensor for name, tensor in placed.items() if tensor.is_floating_point() and tensor.numel()}
        if not floats:
            return
        # The extremes of a tensor are NaN if one value is. They need no mask as large as the tensor.
        extremes = torch.stack([torch.stack(torch.aminmax(tensor)) for tensor in floats.values()])
        for name, is_finite in zip(floats, extremes.isfinite().all(dim=1).tolist(), strict=True):
            if not is_finite:
                folder, origin = self.checkpoint.folder, self.checkpoint.origins[name]
                raise WeightMismatch(f"{folder}: {origin} holds NaN or infinity; export the weights again")


def _part(network: nn.Module, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the part of a checkpoint's tensor that ``network`` holds, one slice per dimension."""
    module = network.get_submodule(name.rpartition(".")[0])
    return module.part(shape) if isinstance(module, Linear) else tuple(slice(0, size) for size in shape)


def _touch(tensor: Tensor) -> None:
    """Read a tensor that is mapped to a file into memory, by one byte of each page."""
    with stage("read"):
        if tensor.dim() and tensor.is_contiguous():
            tensor.view(torch.uint8).flatten()[::4096].any()


def _expect(folder: Path, name: str, header: TensorHeader, wanted: Tensor) -> None:
    if header.shape != tuple(wanted.shape):
        raise WeightMismatch(
            f"{folder}: {name} has shape {list(header.shape)}, config.json asks for {list(wanted.shape)}"
        )
    if header.is_floating_point != wanted.is_floating_point():
        raise WeightMismatch(f"{folder}: {name} has dtype {header.dtype}, expected {wanted.dtype}")
    if header.is_floating_point and header.dtype not in FLOATS:
        raise WeightMismatch(f"{folder}: {name} has dtype {header.dtype}; only matrices of targets may be quantized")
