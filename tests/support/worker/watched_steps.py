"""Backend that shows whether captured steps could be CUDA graphs: they wait for nothing and repeat the same calls."""

from __future__ import annotations

from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdecode_worker.engine.cuda_graphs import Captured, Work

WAITING = (
    "aten._local_scalar_dense",
    "aten.item",
    "aten.is_nonzero",
    "aten.equal",
    "aten.nonzero",
    "aten.argwhere",
    "aten.masked_select",
    "aten.masked_scatter",
    "aten.unique",
    "aten._unique",
    "aten.bincount",
    "aten.repeat_interleave",
    "aten.lift_fresh",  # the result of torch.tensor on host values
    "aten.set_",
)


def _waits(self: Tensor, *_: Any) -> Any:
    raise AssertionError("reading a tensor's numbers waits for the device")


class Watch(TorchDispatchMode):
    """Dispatch mode that raises for operations that a capture refuses, and records the others."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[Any] = []
        self._made: dict[int, Tensor] = {}  # referenced, so that no address is used again

    def __enter__(self) -> Self:
        self._patch = pytest.MonkeyPatch()
        for name in ("tolist", "numpy", "__array__"):  # these dispatch no operation for CPU tensors
            self._patch.setattr(Tensor, name, _waits)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func)
        if name.startswith(WAITING):
            raise AssertionError(f"{name} waits for the device")
        if name.startswith(("aten.index.", "aten.index_put")) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            raise AssertionError(f"{name} by a mask: its size is what the mask holds")
        self.trace.append((name, self._describe(args), self._describe(sorted(kwargs.items()))))
        output = func(*args, **kwargs)
        for made in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(made, Tensor) and not self._known(made, args):
                self._made[made.untyped_storage().data_ptr()] = made
        return output

    @staticmethod
    def _known(made: Tensor, args: Any) -> bool:
        """Return whether the result is a view of an argument or was written into one."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        return any(made.untyped_storage().data_ptr() == arg.untyped_storage().data_ptr() for arg in tensors)

    def _describe(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            address = value.untyped_storage().data_ptr()
            place = None if address in self._made else (address, value.storage_offset())
            return str(value.dtype), tuple(value.shape), value.stride(), str(value.device), place
        if isinstance(value, (list, tuple)):
            return tuple(map(self._describe, value))
        return repr(value)


class WatchingBackend:
    """Backend that repeats the work on every replay and records it. ``traces`` has one list per captured step."""

    def __init__(self) -> None:
        self.traces: list[list[Any]] = []

    def capture(self, work: Work) -> Captured:
        mine: list[Any] = []
        self.traces.append(mine)

        def replay() -> None:
            watch = Watch()
            with watch:
                work()
            mine.append(watch.trace)

        replay()  # on padding rows only, as a real capture does
        return Captured(replay)

    def clear(self) -> None:
        raise AssertionError("no draft changes here")

    def check(self) -> None:
        for traces in self.traces:
            for other in traces[1:]:
                assert len(traces[0]) == len(other), "two steps of one key make as many calls"
                for one, two in zip(traces[0], other, strict=True):
                    assert one == two, "two steps of one key make the same calls"
