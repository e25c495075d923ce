"""KV compaction kernel, interpreted: equal to the reference bit for bit.

The interpreter runs the threads of a program in lockstep, so it cannot detect a missing barrier. It can detect that one
program does not own all overlapping pairs, or writes before it reads.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdecode_kernels.kv_keep import kernel, op, reference
from support.kernels.interpreted import Plant

Moves = list[tuple[int, int]]
NAMED: dict[str, list[Moves]] = {
    "a path": [[(17, 16), (20, 17), (23, 18)]],
    "a chain": [[(16, 16), (17, 17), (18, 18)]],
    "nothing": [[(0, 0), (0, 0)]],
    "a shift back": [[(17, 16), (18, 17), (19, 18), (20, 19)]],
    "a shift ahead": [[(16, 17), (17, 18), (18, 19)]],
    "a cycle": [[(16, 20), (20, 24), (24, 16)]],
    "several sequences, one padded": [[(18, 17), (21, 18)], [(0, 0), (0, 0)], [(41, 40), (43, 41)]],
}


def cache(layers: int, kv: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a cache in which every element is a different number, with an odd number of blocks."""
    shape = (layers, 2, 7, 16, kv, size)
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape).to(dtype)


def differs_from_reference(module: ModuleType, groups: list[Moves], layers: int, kv: int, size: int) -> bool:
    pairs = [pair for moves in groups for pair in moves]
    source, target = torch.tensor(pairs).unbind(1)
    actual, wanted = cache(layers, kv, size), cache(layers, kv, size)
    module.kv_keep(actual, source, target, len(groups[0]))
    reference.kv_keep(wanted, source, target)
    return not torch.equal(actual, wanted)


@pytest.mark.parametrize(("kv", "size"), [(1, 8), (3, 5), (2, 96)])
@pytest.mark.parametrize("name", NAMED)
def test_named_moves(name: str, kv: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_MOST_ELEMENTS", 64)
    assert not differs_from_reference(kernel, NAMED[name], 2, kv, size)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(1, 3))
def test_any_moves(data: st.DataObject, pairs: int, layers: int) -> None:
    targets = data.draw(st.lists(st.integers(16, 111), min_size=pairs, max_size=pairs, unique=True))
    moves = [(data.draw(st.integers(16, 111)), target) for target in targets]
    assert not differs_from_reference(kernel, [moves], layers, 2, 4)


@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("group", [None, 2])
def test_the_op_runs_the_kernel(group: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    right = kernel.kv_keep
    monkeypatch.setattr(kernel, "kv_keep", lambda *args: (asked.append(args[3]), right(*args)))
    source, target = torch.tensor([18, 21, 0, 0]), torch.tensor([17, 18, 0, 0])
    actual, wanted = cache(2, 2, 8), cache(2, 2, 8)
    op.kv_keep(actual, source, target, group=group)
    reference.kv_keep(wanted, source, target)
    assert torch.equal(actual, wanted)
    assert asked == [group or 4]


def test_half_precision_cache_inside_a_larger_tensor() -> None:
    wide = cache(2, 3, 8, torch.float16)
    actual, wanted = wide[:, :, :, :, :3], wide.clone()
    kernel.kv_keep(actual, torch.tensor([18]), torch.tensor([17]), 1)
    reference.kv_keep(wanted, torch.tensor([18]), torch.tensor([17]))
    assert torch.equal(actual, wanted)


BUGS: dict[str, tuple[str, str]] = {
    "sources and targets change places": ("rows + from_S[:, None]", "rows + to_S[:, None]"),
    "keys alone": ("half * half_stride", "0 * half * half_stride"),
    "one layer": ("layer * layer_stride", "0 * layer * layer_stride"),
    "the last column is left out": ("(column < width)", "(column < width - 1)"),
    "the last pair is left out": ("moves = (s < pairs)", "moves = (s < pairs - 1)"),
    "a slot's block is dropped": ("(source // PAGE) * block_stride", "block_stride"),
    "sequences move by the first one's pairs": ("source_S + group * pairs", "source_S + 0 * pairs"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_detected(bug: str, plant: Plant) -> None:
    moves = [[(34, 33), (37, 34)], [(70, 65), (71, 66)]]
    assert not differs_from_reference(kernel, moves, 2, 3, 5)
    assert differs_from_reference(plant(kernel, *BUGS[bug]), moves, 2, 3, 5)


def test_moving_pairs_one_by_one_is_detected(plant: Plant) -> None:
    """Groups of one pair, processed one after the other, give wrong results where pairs overlap."""
    module = plant(kernel, "block_s = triton", "group = 1; block_s = triton")
    assert differs_from_reference(module, NAMED["a shift ahead"], 2, 2, 4)
    assert differs_from_reference(module, NAMED["a cycle"], 2, 2, 4)
