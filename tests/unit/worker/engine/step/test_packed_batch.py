"""Packed tokens, their slots in the paged cache, the keys that a pass reads, and the keys that are kept."""

from __future__ import annotations

from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st

from specdecode_kernels.step_tables.op import begin, commit
from specdecode_kernels.step_tables.tables import SlotState, Verified
from specdecode_worker.core.device_state import DeviceState, PackedBatch, PagedCache, slots_of, spread
from specdecode_worker.core.kv_cache import BLOCK_SIZE, PADDING_BLOCK

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_packed_tokens_map_to_their_sequence_and_row(counts: list[int]) -> None:
    sequence_T, row_T = spread(tuple(counts), CPU)
    assert sequence_T.tolist() == list(chain.from_iterable([b] * n for b, n in enumerate(counts)))
    assert row_T.tolist() == list(chain.from_iterable(range(n) for n in counts))


@given(st.permutations(range(1, 9)), st.integers(0, 3 * BLOCK_SIZE - 1), st.integers(0, 1))
def test_a_key_is_stored_in_the_block_of_its_index(blocks: list[int], index: int, sequence: int) -> None:
    table_BM = torch.tensor(blocks[:8]).view(2, 4)
    slot = int(slots_of(table_BM, torch.tensor([sequence]), torch.tensor([index]))[0])
    assert divmod(slot, BLOCK_SIZE) == (int(table_BM[sequence, index // BLOCK_SIZE]), index % BLOCK_SIZE)


def cache(blocks: int = 6) -> PagedCache:
    return PagedCache(layers=2, blocks=blocks, heads=2, kv_heads=1, head_dim=4, dtype=torch.float64, device=CPU)


def packed(blocks: list[list[int]], lengths: list[int], counts: list[int], ancestors: list[int]) -> PackedBatch:
    table_BM = torch.tensor(blocks)
    prefix_B = torch.tensor(lengths)
    sequence_T, row_T = spread(tuple(counts), CPU)
    return PackedBatch(
        tokens_T=torch.zeros_like(row_T),
        positions_T=prefix_B[sequence_T] + row_T,
        slots_T=slots_of(table_BM, sequence_T, prefix_B[sequence_T] + row_T),
        prefix_len_B=prefix_B,
        ancestors_T=torch.tensor(ancestors),
        block_table_BM=table_BM,
        blocks=tuple(map(tuple, blocks)),
        query_counts=tuple(counts),
        key_bounds=tuple(length + count for length, count in zip(lengths, counts, strict=True)),
        key_starts=(0,) * len(counts),
        dense=False,
    )


def test_query_starts_are_running_sums() -> None:
    assert packed([[1], [2]], [0, 0], [3, 2], [0] * 5).query_start == (0, 3, 5)


def test_a_pass_writes_keys_only_to_its_own_slots_and_layer() -> None:
    paged = cache()
    step = packed([[3, 1], [2, 5]], [15, 0], [2, 1], [0, 0, 0])
    k, v = torch.randn(3, 1, 4).double(), torch.randn(3, 1, 4).double()
    paged.attend(step)(1, torch.randn(3, 2, 4).double(), k, v)
    rows = paged.data.flatten(2, 3)
    slots = [3 * BLOCK_SIZE + 15, BLOCK_SIZE, 2 * BLOCK_SIZE]
    assert torch.equal(rows[1, 0, slots], k)
    assert torch.equal(rows[1, 1, slots], v)
    rows[1][:, slots] = 0
    assert not paged.data.any()


def test_attention_reads_only_the_keys_of_its_sequence() -> None:
    """Attention of a sequence does not depend on the place of its blocks.

    The same prompt runs in adjacent and in scattered blocks, alone and with another sequence, chunk by chunk.
    """
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(40, heads, 4, generator=generator).double() for heads in (2, 1, 1))

    def run(blocks: list[int], chunks: list[int], with_other: bool) -> torch.Tensor:
        paged, out, start = cache(9), [], 0
        paged.data += 0.5  # stale values of other sequences are finite and must not be read
        for count in chunks:
            rows = slice(start, start + count)
            if with_other:
                other = torch.ones(2, 2, 4).double()
                step = packed([blocks, [7, 8, 0]], [start, 0], [count, 2], [0] * (count + 2))
                tensors = (torch.cat((x[rows], other[:, : x.shape[1]])) for x in (q, k, v))
                out.append(paged.attend(step)(0, *tensors)[:count])
            else:
                out.append(paged.attend(packed([blocks], [start], [count], [0] * count))(0, q[rows], k[rows], v[rows]))
            start += count
        return torch.cat(out)

    whole = run([1, 2, 3], [40], with_other=False)
    for output in (run([5, 1, 4], [40], False), run([1, 2, 3], [7, 20, 13], False), run([6, 2, 1], [16, 24], True)):
        torch.testing.assert_close(output, whole)


def test_accepted_keys_move_behind_the_prefix_and_others_stay() -> None:
    """Keys of accepted nodes move to the end of the prefix, and all other keys stay.

    The root is at index 14 and the path is nodes 2 and 4, so their keys move to indices 15 and 16, across a block
    boundary.
    """
    paged = cache()
    paged.data.copy_(torch.arange(paged.data.numel()).view_as(paged.data))
    before = paged.data.flatten(2, 3).clone()
    state = DeviceState(2, 64, torch.float64, CPU)
    state.set_blocks([1, 1], [0, 1], [4, 2])
    state.length_S[1] = 14
    slots = SlotState(state.tokens_SP, state.length_S, state.block_table_SM, BLOCK_SIZE)
    rows = begin(slots, torch.tensor([1, state.padding_slot]), torch.tensor([1, 0]))
    tokens, chosen = torch.tensor([-2, 6, 7, 6, 8]), torch.tensor([7, 0, 8, 0, 9])
    trees = Verified(torch.tensor([0, 5]), torch.tensor([[-1, 0, 0, 2, 2]]), tokens, chosen)
    done = commit(slots, rows, trees, None, torch.tensor([9]), 2)
    paged.keep(done.source_BD.flatten(), done.target_BD.flatten(), group=2)
    after = paged.data.flatten(2, 3)
    slot = [4 * BLOCK_SIZE + index if index < 16 else 2 * BLOCK_SIZE + index - 16 for index in range(32)]
    assert torch.equal(after[:, :, slot[15]], before[:, :, slot[16]])
    assert torch.equal(after[:, :, slot[16]], before[:, :, slot[18]])
    same = [s for s in range(BLOCK_SIZE, 6 * BLOCK_SIZE) if s not in (slot[15], slot[16])]
    assert torch.equal(after[:, :, same], before[:, :, same]), f"only block {PADDING_BLOCK} may take what is padding"
    assert state.tokens_SP[1, 15:18].tolist() == [7, 8, 9]
    assert state.length_S.tolist() == [0, 17, 0]
