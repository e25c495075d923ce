"""Command that counts the variants that Triton would compile while batches of ugly shapes are served.

    count_variants.py [KERNEL.ARGUMENT ...]     arguments to specialise in spite of their ``do_not_specialize``

A variant is a set of compile-time constants, types, and properties of the other arguments: divisible by 16, equal to 1.
Nothing is compiled or computed: launches are replaced by Triton's own specialisation of their arguments. Prints JSON:
{kernel: {"variants": number, "varying": [arguments whose properties differ between launches with equal constants and
pointer types]}}.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from specdecode_kernels import dispatch
from specdecode_kernels.draft_input import kernel as draft_input
from specdecode_kernels.kv_keep import kernel as kv_keep
from specdecode_kernels.noise import kernel as noise
from specdecode_kernels.quantised_linear import dequantise_kernel, scaled_kernel
from specdecode_kernels.quantised_linear import kernel as quantised_linear
from specdecode_kernels.quantised_linear.reference import quantise
from specdecode_kernels.rms_norm import kernel as rms_norm
from specdecode_kernels.rope_cache import kernel as rope_cache
from specdecode_kernels.sample import kernel as sample
from specdecode_kernels.sample.reference import Truncation
from specdecode_kernels.silu_mul import kernel as silu_mul
from specdecode_kernels.small_linear import kernel as small_linear
from specdecode_kernels.small_linear import op as small_linear_op
from specdecode_kernels.top_k import kernel as top_k
from specdecode_kernels.tree_attention import kernel as tree_attention
from specdecode_kernels.tree_attention.plan import plan
from specdecode_kernels.verify import kernel as verify
from specdecode_kernels.verify import rounds
from specdecode_worker.engine.cuda_graphs import Captured, EagerBackend, Work
from support.small_llama import engine_of, networks, plan_of

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
VOCABULARY, DRAFT_VOCABULARY, SIZE, LAYERS = 2048, 512, 64, 2
BATCHES = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 64)
ROWS_OF_GRAPHS = (1, 3, 4, 16, 17)
Properties = dict[str, Any]
seen: dict[str, dict[str, list[Properties]]] = defaultdict(lambda: defaultdict(list))
binders: dict[str, Any] = {}


def record(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
    """Specialise the arguments of a launch as Triton does; replaces ``JITFunction.run``."""
    if self.__name__ not in binders:
        binders[self.__name__] = create_function_from_signature(self.signature, self.params, BACKEND)
    _, specialization, options = binders[self.__name__](*args, **kwargs)
    constants, properties = [str(sorted(options.items()))], {}
    for parameter, (kind, value) in zip(self.params, specialization, strict=True):
        if parameter.is_constexpr:
            constants.append(f"{parameter.name}={value}")
        elif kind.startswith("*"):
            constants.append(f"{parameter.name}:{kind}")
            properties[parameter.name] = value
        else:
            properties[parameter.name] = (kind, value)
    different = seen[self.__name__][" ".join(constants)]
    if properties not in different:
        different.append(properties)


def odd(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return zeros at an address that is not divisible by 16, as tables behind others have."""
    count = torch.Size(shape).numel()
    return torch.zeros(count + 1, dtype=dtype)[1:].view(shape)


def tables(*shape: int, dtype: torch.dtype = torch.int64) -> Iterator[Tensor]:
    """Yield zeros at an aligned and at an odd address."""
    yield torch.zeros(shape, dtype=dtype)
    yield odd(*shape, dtype=dtype)


def floats(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def attention(batch: int, tokens: int, columns: int) -> None:
    """Launch the plan and the attention of a pass."""
    cache = floats(2, 4, 16, 2, 16)
    for starts, prefix, ancestors in zip(tables(batch + 1), tables(batch), tables(tokens), strict=True):
        made = plan(
            query_start=starts,
            prefix_len_B=prefix,
            key_start_B=prefix,
            ancestors_T=ancestors,
            block_table_BM=odd(batch, columns),
            block_size=16,
            groups=2,
            kv_heads=2,
        )
        tree_attention.attend(floats(tokens, 4, 16), cache, made)


def rows_of_a_pass(rows: int) -> None:
    """Launch everything that runs once for each packed row."""
    x, out = floats(rows, SIZE), floats(rows, 2 * SIZE)
    rms_norm.rms_norm(x, floats(SIZE), 1e-5, x)
    rms_norm.rms_norm(x, floats(SIZE), 1e-5)
    silu_mul.silu_mul(out)
    cos, cache, heads = floats(8, 16), floats(2, 2, 16, 2, 16), floats(rows, 8, 16)
    logits, draft_logits = floats(rows, VOCABULARY), floats(rows, DRAFT_VOCABULARY)
    for table, row in zip(tables(rows), tables(rows, dtype=torch.float32), strict=True):
        rope_cache.rope_cache(heads[:, :4], heads[:, 4:6], heads[:, 6:], cos, cos, table, table, cache)
        draft_input.draft_input(floats(8, SIZE), table, x, table, floats(SIZE), floats(SIZE), 1e-5)
        noise.gumbel(table, table, VOCABULARY, 0)
        noise.gumbel(table, table, VOCABULARY, 1)
        cuts = sample.cuts(logits, row, Truncation(table, row, row))
        sample.processed(logits, row, cuts)
        verify.choose(logits, row, table, table, None)
        verify.choose(logits, row, table, table, cuts)
        for ids in tables(DRAFT_VOCABULARY):
            top_k.top_k(draft_logits, 4, row, table, table, ids, 1.5, None)
    for kind in ("int4", "int8", "fp8"):
        if rows <= 256:
            quantised_linear.linear(x, quantise(floats(2 * SIZE, SIZE), kind))
        dequantise_kernel.dequantise(quantise(floats(2 * SIZE, SIZE), kind), x.dtype)
    scaled_kernel.linear(x, quantise(floats(2 * SIZE, SIZE), "fp8"))
    if rows <= small_linear_op.MOST_ROWS:
        small_linear.small_linear(x, floats(2 * SIZE, SIZE), None, None, gated=False)


def trees(batch: int, nodes: int, depth: int) -> None:
    """Launch what follows a pass without a graph."""
    width = max(nodes - 1, 1)
    law = floats(batch, nodes, VOCABULARY, dtype=torch.float32)
    for table, drawn, row in zip(tables(batch, nodes), tables(batch, nodes), tables(batch), strict=True):
        rounds.multi_round(table, drawn, law, law, row, row, depth, torch.ones_like(drawn, dtype=torch.bool), width)
        for slots in tables(batch * depth):
            kv_keep.kv_keep(floats(LAYERS, 2, 4, 16, 2, 16), slots, slots, depth)


class RecordingBackend(EagerBackend):
    """Capture backend that runs a step once."""

    def capture(self, work: Work) -> Captured:
        return self.timed(work)


def graphs() -> None:
    """Launch the captured steps of several plans, for every number of rows."""
    # fp32, because bf16 matrices on a CPU are packed for its own kernels.
    pair = networks(
        torch.float32, vocab_size=VOCABULARY, hidden_size=SIZE, num_attention_heads=4, num_key_value_heads=2
    )
    for shape in ("chain:1", "chain:5", "tree:2,2,1"):
        engine = engine_of(
            pair,
            max_num_seqs=max(ROWS_OF_GRAPHS),
            blocks=40,
            budget=4096,
            backend=RecordingBackend(),
            rows=ROWS_OF_GRAPHS,
        )
        engine.set_plan(plan_of(shape))


@contextmanager
def zeros_for_empty() -> Iterator[None]:
    """Make new memory zeros: the skipped kernels leave what is there, and it is used as indices."""
    right = torch.empty

    def empty(*size: Any, **kwargs: Any) -> Tensor:
        # Not torch.zeros, which calls torch.empty on some devices.
        made: Tensor = right(*size, **kwargs)
        return made.zero_()

    def new_empty(self: Tensor, *size: Any, **kwargs: Any) -> Tensor:
        return self.new_zeros(*size, **kwargs)

    with (
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(torch, "empty_like", torch.zeros_like),
        mock.patch.object(Tensor, "new_empty", new_empty),
    ):
        yield


def main() -> None:
    for name in sys.argv[1:]:
        kernel, _, argument = name.partition(".")
        modules = (rope_cache, small_linear, tree_attention, verify, top_k)
        functions = [vars(module)[kernel] for module in modules if kernel in vars(module)]
        for parameter in functions[0].params:
            if parameter.name == argument:
                parameter.do_not_specialize = False
    patches = (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(dispatch, "on_gpu", return_value=True),
        mock.patch.object(small_linear_op, "LEAST_OUTPUTS", 1),
    )
    with torch.no_grad(), patches[0], patches[1], patches[2], zeros_for_empty():
        for batch in BATCHES:
            for tokens, columns in ((batch, 16), (batch + 1, 17), (6 * batch, 33), (256, 40), (517, 129)):
                attention(batch, max(tokens, batch), columns)
        for nodes, depth in ((1, 1), (4, 3), (6, 5), (21, 3), (61, 4)):
            for batch in (1, 2, 3):
                trees(batch, nodes, depth)
        for rows in (*BATCHES, 130, 255, 256, 517):
            rows_of_a_pass(rows)
        graphs()
    print(json.dumps({name: summary(groups) for name, groups in sorted(seen.items())}))


def summary(groups: dict[str, list[Properties]]) -> dict[str, Any]:
    """Return the number of variants of a kernel, and the arguments that make more than one of equal constants."""
    varying = {
        name
        for different in groups.values()
        for name in different[0]
        if len({str(properties[name]) for properties in different}) > 1
    }
    return {"variants": sum(map(len, groups.values())), "varying": sorted(varying)}


if __name__ == "__main__":
    main()
