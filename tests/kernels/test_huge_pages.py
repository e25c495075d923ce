"""Memory of packed weights, which needs no processor that computes with them."""

from __future__ import annotations

import errno
import mmap

import pytest

from specdecode_kernels.cpu import matrix


def test_a_system_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class SmallPages(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", SmallPages)
    assert matrix._huge((3, 2**20)).shape == (3, 2**20)
