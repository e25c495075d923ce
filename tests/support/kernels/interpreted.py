"""Import of kernels for Triton's interpreter: on CPU tensors, one program after another, without a compiler.

Triton decides between interpreting and compiling when a function is decorated, and for its own library when that is
first imported (tests/conftest.py sets this up). Kernels are therefore imported here, before any test can import them in
the other mode.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

Plant = Callable[[ModuleType, str, str], ModuleType]
"""Function that makes a copy of a kernel module with a piece of its source replaced."""
_PACKAGE = "specdecode_kernels"


def interpreting() -> AbstractContextManager[object]:
    """Make functions that are decorated in this block run interpreted."""
    return mock.patch.dict(os.environ, TRITON_INTERPRET="1")


def kernel_modules() -> list[str]:
    """Return the names of all modules of the package that decorate kernels."""
    root = Path(importlib.import_module(_PACKAGE).__file__ or "").parent
    names = sorted(path.relative_to(root.parent) for path in root.rglob("*.py") if "@triton.jit" in path.read_text())
    return [".".join(name.with_suffix("").parts) for name in names]


def import_kernels() -> None:
    """Import all kernels interpreted; raises RuntimeError if triton was imported before in compiling mode."""
    with interpreting():
        for name in kernel_modules():
            importlib.import_module(name)
        import interpreter
        import triton.language as tl

        interpreter.repair()
        if type(tl.interleave).__name__ != "InterpretedFunction":
            raise RuntimeError(
                "triton was imported too early to be interpreted: leave TRITON_INTERPRET as tests/conftest.py sets it"
            )
        # Triton imports the rest of its library at the first launch.
        noise = importlib.import_module(f"{_PACKAGE}.noise.kernel")
        noise.gumbel(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 4, 0, block=4)


def mutant(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """Return a copy of the module with a bug in its source: ``old``, which must occur there, is replaced by ``new``."""
    source = Path(module.__file__ or "").read_text()
    assert old in source, f"{module.__name__} does not say {old!r} any more: plant the bug elsewhere"
    path = folder / f"{module.__name__.replace('.', '_')}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    copied = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = copied  # dataclasses look up their module here
    with interpreting():
        spec.loader.exec_module(copied)
    return copied


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normally distributed numbers of this seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run_compiling(*command: object, paths: Sequence[str] = (), **environment: str) -> str:
    """Return what a program prints in a process of its own, in which Triton compiles."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    own |= environment | {"PYTHONPATH": os.pathsep.join([*paths, *(path for path in sys.path if path)])}
    ran = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=own)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout
