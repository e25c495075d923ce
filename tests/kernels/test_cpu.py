"""Compiled CPU operations against exact arithmetic on the same rounded numbers, and their independence of the batch.

The bits of a row must not depend on the other rows, on the number of threads, or on whether the token was drafted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from specdecode_kernels.cpu import native
from specdecode_kernels.cpu.matrix import pack, pack_gated
from specdecode_kernels.cpu.ops import HEAD_SIZES, Entry, Heads, Linear, Norm, Pages, Tail, attend
from support.tiers import skip_reason

pytestmark = pytest.mark.skipif(native.library() is None, reason=skip_reason("native", "nothing is compiled here"))
BLOCK = 16


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def assert_near(actual: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(actual.double(), exact, atol=2**-8 * float(exact.abs().mean()), rtol=2**-8)


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 64, 100])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (33, 96), (1, 2), (100, 30), (31, 576)])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_linear(rows: int, outputs: int, inputs: int, bias: bool) -> None:
    x, weight = numbers(rows, inputs), numbers(outputs, inputs, seed=1)
    added = numbers(outputs, seed=2) if bias else None
    run = Linear(pack(weight, added))
    exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
    assert_near(run(x), exact)
    alone = torch.cat([run(row[None]) for row in x])
    assert torch.equal(run(x), alone), "a row's bits are its own"
    torch.set_num_threads(1)
    assert torch.equal(run(x), alone)


def test_linear_reads_strided_rows() -> None:
    wide, weight = numbers(6, 80), numbers(40, 64, seed=1)
    run = Linear(pack(weight))
    assert torch.equal(run(wide[:, 8:72]), run(wide[:, 8:72].contiguous()))
    assert run(wide[:, 8:72].view(2, 3, 64)).shape == (2, 3, 40)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("size", [1, 15, 64, 576])
def test_norm(rows: int, size: int) -> None:
    x, weight = numbers(rows, size), numbers(size, seed=1)
    run = Norm(weight, 1e-5)
    assert_near(run(x.view(rows, 1, size)).view(rows, size), rms(x.double(), weight, 1e-5))
    assert torch.equal(run(x), torch.cat([run(row[None]) for row in x]))


@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize("normed", [False, True], ids=["", "norms"])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_entry(size: int, normed: bool, rows: int) -> None:
    """Norm, projections, norms of heads and rotation agree with exact arithmetic up to two roundings."""
    heads, inputs = Heads(6, 2, size), 80
    x, weight = numbers(rows, inputs), numbers(10 * size, inputs, seed=1, scale=0.2)
    norm, head_norm = numbers(inputs, seed=2), numbers(8, size, seed=3)
    angle = torch.outer(torch.arange(rows) + 3.0, torch.arange(size // 2) + 1.0).repeat(1, 2)
    cos, sin = angle.cos().bfloat16()[:, None], angle.sin().bfloat16()[:, None]
    entry = Entry(
        pack(weight),
        heads,
        norm_weight=norm if normed else None,
        norm_eps=1e-5,
        head_norm_HD=head_norm if normed else None,
        head_eps=1e-6,
    )
    q, k, v = entry(x, (cos, sin))
    exact = x.double()
    if normed:
        exact = rms(exact, norm, 1e-5).bfloat16().double()
    exact = (exact @ weight.double().T).view(rows, 10, size)
    turning = exact[:, :8]
    if normed:
        turning = rms(turning, head_norm, 1e-6)
    half = size // 2
    turned = turning * cos.double() + torch.cat((-turning[..., half:], turning[..., :half]), -1) * sin.double()
    for actual, wanted in ((q, turned[:, :6]), (k, turned[:, 6:]), (v, exact[:, 8:])):
        tolerance = 2**-5 * float(wanted.abs().mean())
        torch.testing.assert_close(actual.double(), wanted, atol=tolerance, rtol=2**-7)
    each = [entry(x[i : i + 1], (cos[i : i + 1], sin[i : i + 1])) for i in range(rows)]
    for actual, alone in zip((q, k, v), zip(*each, strict=True), strict=True):
        assert torch.equal(actual, torch.cat(alone))


@pytest.mark.parametrize(("size", "width"), [(64, 96), (80, 50), (96, 33 * 2)])
@pytest.mark.parametrize("rows", [1, 4, 30])
def test_tail(size: int, width: int, rows: int) -> None:
    attended, residual = numbers(rows, 64), numbers(rows, size, seed=1)
    o, down = numbers(size, 64, seed=2, scale=0.2), numbers(size, width, seed=5, scale=0.2)
    gate, up = numbers(width, size, seed=3, scale=0.2), numbers(width, size, seed=4, scale=0.2)
    norm = numbers(size, seed=6)
    gate_bias, up_bias = numbers(width, seed=7), numbers(width, seed=8)
    gated = pack_gated(gate, up, gate_bias, up_bias)
    tail = Tail(pack(o), gated, pack(down), norm_weight=norm, norm_eps=1e-5)
    actual = tail(attended.view(rows, 2, 32), residual)
    x = residual.double() + attended.double() @ o.double().T
    normed = rms(x, norm, 1e-5)
    gates, ups = F.linear(normed, gate.double(), gate_bias.double()), F.linear(normed, up.double(), up_bias.double())
    exact = x + (F.silu(gates) * ups) @ down.double().T
    torch.testing.assert_close(actual.double(), exact, atol=2**-5 * float(exact.abs().mean()), rtol=2**-6)
    assert torch.equal(actual, torch.cat([tail(attended[i : i + 1], residual[i : i + 1]) for i in range(rows)]))


class Paged:
    """Sequences of given lengths over scattered blocks; unwritten slots hold NaN."""

    def __init__(self, lengths: list[int], *, heads: Heads, room: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.lengths = heads, lengths
        needed = [-(-(length + room) // BLOCK) for length in lengths]
        order = (torch.randperm(sum(needed), generator=generator) + 1).split(needed)
        self.table = torch.zeros(len(lengths), max(needed), dtype=torch.int64)
        for row, owned in zip(self.table, order, strict=True):
            row[: len(owned)] = owned
        self.cache = torch.full((2, sum(needed) + 1, BLOCK, heads.keys, heads.size), math.nan).bfloat16()
        for b, length in enumerate(lengths):
            slots = self.slots(b, range(length))
            self.cache.flatten(1, 2)[:, slots] = numbers(2, length, heads.keys, heads.size, seed=seed + b)

    def slots(self, b: int, indices: range | list[int]) -> Tensor:
        index = torch.tensor(list(indices), dtype=torch.int64)
        return self.table[b, index // BLOCK] * BLOCK + index % BLOCK

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, ancestors: list[list[int]], first: list[int] | None = None
    ) -> Tensor:
        counts = [len(own) for own in ancestors]
        pages = Pages(
            block_table_BM=self.table,
            block_size=BLOCK,
            prefix_len_B=torch.tensor(self.lengths),
            first_B=torch.tensor(first or [0] * len(counts)),
            query_start=torch.tensor(list(accumulate(counts, initial=0))),
            ancestors_T=torch.tensor([bits for own in ancestors for bits in own]),
        )
        spans = zip(self.lengths, counts, strict=True)
        slots = torch.cat([self.slots(b, range(n, n + c)) for b, (n, c) in enumerate(spans)])
        return attend(q, k, v, self.cache, slots, pages, self.heads.size**-0.5)

    def exact(self, q: Tensor, b: int, seen: list[int]) -> Tensor:
        """Compute the exact attention [H, D] of one query over the keys with these indices."""
        groups = self.heads.queries // self.heads.keys
        k, v = (x.double().repeat_interleave(groups, 1) for x in self.cache.flatten(1, 2)[:, self.slots(b, seen)])
        weights = torch.einsum("hd,lhd->hl", q.double(), k).div(self.heads.size**0.5).softmax(-1)
        return torch.einsum("hl,lhd->hd", weights, v)


def tokens(count: int, heads: Heads, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    joined = numbers(count, heads.queries + 2 * heads.keys, heads.size, seed=seed)
    return joined.split((heads.queries, heads.keys, heads.keys), dim=1)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_attention_reads_exactly_the_tokens_of_each_path(data: st.DataObject) -> None:
    heads = Heads(*data.draw(st.sampled_from(((3, 1), (4, 4), (9, 3)))), data.draw(st.sampled_from(HEAD_SIZES)))
    lengths = data.draw(st.lists(st.sampled_from((0, 1, 7, 15, 16, 17, 63, 100)), min_size=1, max_size=3))
    ancestors, seen, first = [], [], []
    for length in lengths:
        rows = data.draw(st.integers(1, 64))
        first.append(data.draw(st.integers(0, length)))
        before = list(range(first[-1], length))
        if data.draw(st.booleans()):
            ancestors.append([0] * rows)
            seen.append([before + list(range(length, length + row + 1)) for row in range(rows)])
            continue
        paths = [[0]]
        for node in range(1, rows):
            paths.append([*paths[data.draw(st.integers(0, node - 1))], node])
        masks = [sum(1 << node for node in path) for path in paths]
        ancestors.append([mask - (1 << 64) if mask >> 63 else mask for mask in masks])
        seen.append([before + [length + node for node in path] for path in paths])
    paged = Paged(lengths, heads=heads, room=64, seed=data.draw(st.integers(0, 99)))
    q, k, v = tokens(sum(map(len, ancestors)), heads, seed=7)
    torch.set_num_threads(data.draw(st.integers(1, 2)))
    actual = paged.run(q, k, v, ancestors, first)
    at = 0
    for b, paths_b in enumerate(seen):
        for path in paths_b:
            assert_near(actual[at], paged.exact(q[at], b, path))
            at += 1


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("length", [0, 5, 16, 100])
def test_drafted_node_is_bit_identical_to_a_plain_token(length: int, threads: int) -> None:
    """A tree with the text as its second path, batched with another sequence, equals decoding one token at a time."""
    torch.set_num_threads(threads)
    heads = Heads(9, 3, 64)
    text, path = tokens(4, heads, seed=3), [0, 2, 3, 5]  # nodes 1 and 4 are not on the path
    paged = Paged([length, 37], heads=heads, room=8)
    q, k, v = tokens(7, heads, seed=9)
    for mine, theirs in zip((q, k, v), text, strict=True):
        mine[path] = theirs
    drafted = paged.run(q, k, v, [[1, 0b11, 0b101, 0b1101, 0b10101, 0b101101], [1]])
    paged = Paged([length, 37], heads=heads, room=8)
    for step, node in enumerate(path):
        one = (x[step : step + 1] for x in text)
        paged.lengths = [length + step]
        plain = paged.run(*one, [[1]])
        assert torch.equal(plain[0], drafted[node])


def test_query_without_visible_keys_yields_zeros() -> None:
    heads = Heads(2, 1, 32)
    paged = Paged([3], heads=heads, room=2)
    assert not paged.run(*tokens(1, heads, seed=1), [[0]], first=[9]).any()


def test_missing_compiler_is_reported_with_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("SPECDECODE_NATIVE", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(native.NativeUnavailable, match="/bin/false failed"):
        native.built()
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(native.NativeUnavailable, match="/no/such/compiler does not start: No such file"):
        native.built()
    monkeypatch.setenv("SPECDECODE_NATIVE", "off")
    with pytest.raises(native.NativeUnavailable, match="off"):
        native.built()


def test_a_build_that_others_can_replace_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECDECODE_NATIVE", str(tmp_path))
    build = tmp_path / f"cpu-{native._identity()}.so"
    build.touch(mode=0o644)
    assert native.built() == build
    for place, mode in ((tmp_path, 0o777), (build, 0o666)):
        before = place.stat().st_mode
        place.chmod(mode)
        with pytest.raises(native.NativeUnavailable, match="only this user can write"):
            native.built()
        place.chmod(before)


def test_a_build_by_root_can_be_loaded_by_another_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An image is built as root, and its worker runs as another user."""
    monkeypatch.setenv("SPECDECODE_NATIVE", str(tmp_path / "native"))
    monkeypatch.setenv("CXX", "/bin/false")
    before = os.umask(0o022)
    try:
        with pytest.raises(native.NativeUnavailable, match="/bin/false failed"):
            native.built()
    finally:
        os.umask(before)
    assert (tmp_path / "native").stat().st_mode & 0o777 == 0o755


def test_a_folder_that_cannot_be_read_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setenv("SPECDECODE_NATIVE", str(tmp_path))
    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(native.NativeUnavailable, match="Permission denied"):
        native.built()
