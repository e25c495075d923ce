"""The file of kernel timings, the choice from it, and the memory of weights packed in formats that only others use."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import pytest

from specdecode_kernels.cpu import matrix
from specdecode_kernels.timings import Case, Timings, describe, read, written

CASES = (
    Case(("fp8", 48, 64), 512, {"scaled": 5.0, "tile": 7.0}),
    Case(("fp8", 48, 64), 128, {"scaled": 5.0, "tile": 3.0}),
    Case(("int8", 48, 64), 128, {"tile": 1.0}),
)
TIMINGS = Timings("a GPU", CASES, (Case((32, 8, 128), 8192, {"kernel": 2.0, "sdpa": 1.0}),))
NO_TIMINGS = "not a file of kernel timings"


def test_written_timings_are_read(tmp_path: Path) -> None:
    path = tmp_path / "timings.json"
    path.write_text(written(TIMINGS))
    again = read(path)
    assert (again.gpu, again.products, again.prefill) == (TIMINGS.gpu, TIMINGS.products, TIMINGS.prefill)
    path.write_text(written(Timings("a GPU", CASES[:1])))
    assert len(again.digest) == 12
    assert read(path).digest != again.digest


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", NO_TIMINGS),
        ("[]", NO_TIMINGS),
        ("{", NO_TIMINGS),
        ('{"format": 1}', NO_TIMINGS),
        ('{"format": 1, "gpu": "", "products": [{"key": 3}], "prefill": []}', NO_TIMINGS),
        ("\xff", NO_TIMINGS),
        (written(TIMINGS).replace('"format": 1', '"format": 2'), "format 2 is unknown; measure again with hack/gpu"),
    ],
)
def test_other_files_are_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "timings.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"timings\.json: {reason}"):
        read(path)


def test_description_has_the_fastest_way_of_every_case() -> None:
    assert describe(TIMINGS) == [
        "prefill 32x8x128: 8192: sdpa",
        "product fp8x48x64: 128: tile, 512: scaled",
        "product int8x48x64: 128: tile",
    ]


def test_a_system_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class SmallPages(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", SmallPages)
    assert matrix._huge((3, 2**20)).shape == (3, 2**20)
