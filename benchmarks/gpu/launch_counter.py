"""Counter of the launches of a step, without a GPU: every operation runs on fake CUDA tensors, every kernel is skipped.

An operation counts as one launch if it computes something, and so does a collective with other ranks. Views and
allocations count as none. A tensor on the CPU, a copy between host and device, or a read of a value by the host raises
`HostContact`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from specdecode_kernels import dispatch
from specdecode_kernels.tree_attention import plan
from specdecode_kernels.verify import kernel as verify
from specdecode_worker.models import collectives

WAITING = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "bincount")
"""Operations that read a value of the device on the host."""
INDEXING = ("index", "index_put", "index_put_")
"""Operations that wait for the device if they index by a mask."""
FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "device",
        "promote_types")  # fmt: skip
"""Operations that launch nothing, apart from views."""
PROCESSORS = 132
"""Multiprocessors of an H100 or H200."""


class HostContact(AssertionError):
    """A captured step touched the host."""


class LaunchCounter(TorchDispatchMode):
    """Dispatch mode that counts launches by the name of the operation or the Triton kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition("::")[2].partition(".")[0]
        by_mask = name in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
        if name.rstrip("_") in WAITING or by_mask:
            raise HostContact(f"{name} reads a value of the device")
        _refuse_host(name, (args, kwargs))
        if name == "_to_copy" and torch.device(kwargs.get("device") or "cuda").type == "cpu":
            raise HostContact(f"{name} copies to the host")
        result = func(*args, **kwargs)
        _refuse_host(name, result)
        if name not in FREE and not func.is_view:
            self.launches[name] += 1
        return result

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        """Count a Triton kernel instead of launching it; replaces ``JITFunction.run``."""
        _refuse_host(kernel.__name__, (args, kwargs))
        self.launches[kernel.__name__.strip("_").removesuffix("_kernel")] += 1


class CountedCollectives:
    """Stand-in for `torch.distributed` that counts collectives instead of calling other ranks."""

    def __init__(self, counter: LaunchCounter) -> None:
        self._launches = counter.launches

    def all_reduce(self, tensor: Tensor) -> None:
        self._count("all_reduce", tensor)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        self._count("broadcast", tensor)

    def gather(self, tensor: Tensor, parts: list[Tensor] | None, dst: int) -> None:
        self._count("gather", [tensor, *(parts or ())])

    def _count(self, name: str, tensors: Any) -> None:
        _refuse_host(name, tensors)
        self._launches[name] += 1


def _refuse_host(name: str, values: Any) -> None:
    """Raise HostContact if any of the nested values is a tensor on the CPU."""
    if isinstance(values, Tensor):
        if values.device.type == "cpu":
            raise HostContact(f"{name} has a tensor on the CPU, of shape {tuple(values.shape)}")
    elif isinstance(values, (list, tuple)):
        for value in values:
            _refuse_host(name, value)
    elif isinstance(values, dict):
        _refuse_host(name, list(values.values()))


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Make tensors fake and allow them on a GPU that is not there."""
    patches = [mock.patch.object(module, "processors", return_value=PROCESSORS) for module in (dispatch, plan, verify)]
    patches.append(mock.patch.object(dispatch, "is_hopper", return_value=True))
    with FakeTensorMode(allow_non_fake_inputs=False), torch.no_grad():
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the launches of the block, inside of `fake_gpu`."""
    counter = LaunchCounter()

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        counter.launch(self, *args, **kwargs)

    ranks = mock.patch.object(collectives, "dist", CountedCollectives(counter))
    with mock.patch.object(JITFunction, "run", run), ranks, counter:
        yield counter.launches
