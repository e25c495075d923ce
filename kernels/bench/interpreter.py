"""Repair of Triton's interpreter for numpy 2.5, which tests and dry runs call before they launch kernels in it."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def repair() -> None:
    """Make scalars of interpreted kernels usable as loop bounds with any version of numpy.

    Triton 3.6 keeps a scalar as an array of one element and converts it with ``int``, which numpy 2.5 refuses.
    """
    patch = interpreter._patch_lang_tensor
    if getattr(patch, "repaired", False):
        return

    def patch_and_repair(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    patch_and_repair.repaired = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch_and_repair
