"""Command that compiles every kernel, without a GPU, with the arguments of its launcher in bf16.

    compile_all.py [COMPUTE_CAPABILITY [BEGINNING ...]]

The capability is 90 (an H100) if none is given; hack/gpu-compile runs it for several. Beginnings of names of launches
leave out the others.

It runs in a process of its own because Triton either compiles or interprets. The launchers run on CPU tensors; the
launch itself is left out. What is compiled stays in Triton's cache, where a launch of these arguments on such a GPU
finds it: worker/Dockerfile fills that of the image. Prints JSON: {name of the launch: {"kernels": [...], the
"matrix" instructions that it uses, and the maxima over its kernels of FIGURES}}.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from specdecode_kernels import dependent, dispatch
from specdecode_kernels.draft_input import kernel as draft_input
from specdecode_kernels.grouped_linear import kernel as grouped_linear
from specdecode_kernels.kv_keep import kernel as kv_keep
from specdecode_kernels.noise import kernel as noise
from specdecode_kernels.quantised_linear import dequantise_kernel, scaled_kernel
from specdecode_kernels.quantised_linear import kernel as quantised_linear
from specdecode_kernels.quantised_linear.reference import Kind, quantise
from specdecode_kernels.rms_norm import kernel as rms_norm
from specdecode_kernels.rope_cache import kernel as rope_cache
from specdecode_kernels.rope_cache.reference import FP8
from specdecode_kernels.sample import kernel as sample
from specdecode_kernels.sample.reference import Truncation
from specdecode_kernels.silu_mul import kernel as silu_mul
from specdecode_kernels.small_linear import kernel as small_linear
from specdecode_kernels.step_tables import commit_kernel
from specdecode_kernels.step_tables import kernel as step_tables
from specdecode_kernels.step_tables.tables import SamplingTables, SlotState, Verified
from specdecode_kernels.top_k import kernel as top_k
from specdecode_kernels.tree_attention import kernel as tree_attention
from specdecode_kernels.tree_attention.plan import plan
from specdecode_kernels.verify import kernel as verify
from specdecode_kernels.verify import rounds
from support.kernels.grouped_weights import with_groups

TARGET = GPUTarget("cuda", int(sys.argv[1]) if len(sys.argv) > 1 else 90, 32)
VOCABULARY = 128_256
dependent.is_supported = lambda _: TARGET.arch >= 90
BLOCKING = re.compile(r"= tt\.load .*tensor<")
USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
FIGURES = {
    "registers": "of a thread",
    "stack_bytes": "of a thread, which hold spilled registers",
    "shared_bytes": "of a program",
    "unswizzled": "operands of matrix products that lie in shared memory with bank conflicts",
    "blocking": "loads of tensors in a pipelined loop that are not copied ahead",
    "narrow": "asynchronous copies in a loop that are narrower than 16 bytes a thread",
    "slots": "instructions of all warps for a KiB that a pipelined loop copies",
    "shared_cycles": "cycles of shared memory for a KiB that a pipelined loop copies, without bank conflicts",
}
MATRIX = re.compile(r"\b(HMMA|IMMA|QMMA|DMMA|HGMMA|IGMMA|QGMMA|UTCHMMA|UTCQMMA|UTCIMMA)\b")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?([A-Z][\w.]+)([^;]*);")
COPY = "LDGSTS"
SHARED = ("LDGSTS", "LDSM", "STSM", "LDS", "STS")
"""Instructions that occupy the shared memory of an SM; a cycle for each 128 bytes of a warp."""
compiled: list[dict[str, Any]] = []
launched = JITFunction.run


class Driver:
    """Driver of one TARGET, which this machine need not have."""

    get_current_target = staticmethod(lambda: TARGET)
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
    """Compile a kernel as its launch does, without the launch, and note what was made of it."""
    binary = launched(self, *args, grid=grid, warmup=True, **kwargs)
    usage, machine_code = disassembled(binary.asm["cubin"])
    compiled.append(
        {
            "kernel": self.__name__,
            "matrix": set(MATRIX.findall(machine_code)),
            **usage,
            "shared_bytes": binary.metadata.shared,
            "unswizzled": unswizzled_operands(binary.asm["ttgir"]),
            "blocking": blocking_loads(binary.asm["ttgir"]),
            **costs_of_loops(machine_code),
        }
    )


def unswizzled_operands(ir: str) -> int:
    """Return the number of operands of matrix products that are read from shared memory with bank conflicts.

    Rows of a tile then lie in the same banks (TTGIR: a shared layout with vec = 1). It happens to an operand that a
    pipelined loop also reads for something else.
    """
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.swizzled_shared<.*>)$", ir, re.MULTILINE))
    names = [name for name, layout in layouts.items() if "vec = 1," in layout]
    loads = [line for line in ir.splitlines() if "ttg.local_load" in line and "ttg.dot_op" in line]
    return sum(any(f", {name}," in line for name in names) for line in loads)


def blocking_loads(ir: str) -> int:
    """Return the number of loads of tensors that are not copied asynchronously, in loops that copy others so."""
    found, loops = 0, [(False, 0)]
    for line in ir.splitlines():
        if "scf.for" in line:
            loops.append((False, 0))
        copies, loads = loops[-1]
        loops[-1] = (copies or "async_copy_global_to_local" in line, loads + bool(BLOCKING.search(line)))
        if "scf.yield" in line and len(loops) > 1 and " : tensor" in line:
            copies, loads = loops.pop()
            found += loads if copies else 0
    return found


def disassembled(cubin: bytes) -> tuple[dict[str, int], str]:
    """Return registers and bytes of the stack of a thread, and the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tools = triton.knobs.nvidia
        said, machine_code = (
            subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout
            for command in ([tools.cuobjdump.path, "--dump-resource-usage"], [tools.nvdisasm.path, "--print-code"])
        )
    usage = USAGE.search(said)
    assert usage is not None, said
    return {"registers": int(usage[1]), "stack_bytes": int(usage[2])}, machine_code


def costs_of_loops(machine_code: str) -> dict[str, float]:
    """Return the dearest of the innermost loops that copy ahead: instructions and cycles of shared memory for a KiB.

    A copy of 16 bytes a thread is half a KiB of a warp. All warps run the loop, so what a warp needs is what all need.
    """
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in machine_code.splitlines():
        if line.startswith(".L_"):
            labels[line.strip().rstrip(":")] = len(code)
        elif found := INSTRUCTION.search(line):
            code.append((found[1], found[2]))
            target = re.search(r"\.L_\w+", found[2]) if found[1].startswith("BRA") else None
            if target and target[0] in labels:
                loops.append((labels[target[0]], len(code)))
    costs = {"narrow": 0.0, "slots": 0.0, "shared_cycles": 0.0}
    for start, end in loops:
        if any(start <= other and stop <= end for other, stop in loops if (other, stop) != (start, end)):
            continue
        names = [name for name, _ in code[start:end]]
        copies = [bytes_of(name) for name in names if name.startswith(COPY)]
        if not copies:
            continue
        size = sum(copies) / 1024
        cycles = sum(bytes_of(name) for name in names if name.split(".")[0] in SHARED) / 128
        costs["narrow"] += sum(copied < 512 for copied in copies)
        costs["slots"] = max(costs["slots"], round(len(names) / size, 1))
        costs["shared_cycles"] = max(costs["shared_cycles"], round(cycles / size, 1))
    return costs


def bytes_of(name: str) -> int:
    """Return the bytes that an instruction of a warp moves to or from shared memory."""
    if name.startswith(("LDSM", "STSM")):  # 8x8 matrices of 16 bits
        return 128 * int((re.search(r"\.([124])$", name) or "11")[1])
    width = re.search(r"\.(128|64|U?16|[US]?8)(?:\.|$)", name)
    bits = int(re.sub(r"\D", "", width[1])) if width else 32
    return 32 * bits // 8


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def ints(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.int64)


def floats(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.float32)


def attention(
    tokens: int,
    batch: int,
    groups: int,
    kv: int,
    size: int,
    dtype: torch.dtype,
    stored: torch.dtype | None = None,
) -> None:
    made = plan(
        query_start=ints(batch + 1),
        prefix_len_B=ints(batch),
        key_start_B=ints(batch),
        ancestors_T=ints(tokens),
        block_table_BM=ints(batch, 512),
        block_size=16,
        groups=groups,
        kv_heads=kv,
    )
    q_THD, cache = zeros(tokens, groups * kv, size, dtype=dtype), zeros(2, 2, 16, kv, size, dtype=stored or dtype)
    tree_attention.attend(q_THD, cache, made)


def rope(size: int, stored: torch.dtype = torch.bfloat16) -> None:
    heads = zeros(3, 10, size)
    table = floats(64, size)
    cache = zeros(2, 2, 16, 2, size, dtype=stored)
    rope_cache.rope_cache(heads[:, :6], heads[:, 6:8], heads[:, 8:], table, table, ints(3), ints(3), cache)


def sampling(dtype: torch.dtype, *, truncated: bool) -> None:
    """Launch the sampling, choice and proposal kernels."""
    logits, row = zeros(4, VOCABULARY, dtype=dtype), floats(4)
    truncation = Truncation(ints(4), row, row) if truncated else None
    cuts = sample.cuts(logits, row, truncation)
    sample.processed(logits, row, cuts)
    verify.choose(logits, row, ints(4), ints(4), cuts)
    verify.choose(logits, row, ints(4), ints(4), None)
    for limits in (truncation, None):
        top_k.top_k(logits, 8, row, ints(4), ints(4), ints(VOCABULARY), 1.5, limits)
        top_k.top_k(logits, 8, row, ints(4), ints(4), None, 1.5, limits)


def multi_round(nodes: int, *, drawn: bool) -> None:
    law = floats(2, nodes, 1000)
    drawn_BN = zeros(2, nodes, dtype=torch.bool) if drawn else None
    rounds.multi_round(
        ints(2, nodes), ints(2, nodes), law, law if drawn else None, ints(2), ints(2), 3, drawn_BN, nodes - 1
    )


def quantised_in_groups(kind: Kind) -> None:
    """Launch products with weights as checkpoints store them."""
    weight = with_groups(kind, 4096, 4096, 128)
    for rows in (1, 16):
        quantised_linear.linear(zeros(rows, 4096), weight)
    dequantise_kernel.dequantise(weight, torch.bfloat16)


def quantised(kind: Kind, outputs: int, inputs: int, *, dtype: torch.dtype = torch.bfloat16) -> None:
    weight = quantise(zeros(outputs, inputs), kind)
    for rows in (1, 6, 64):
        quantised_linear.linear(zeros(rows, inputs, dtype=dtype), weight, zeros(outputs, dtype=dtype))


def scaled(outputs: int, inputs: int, rows: int) -> None:
    """Launch the split of rows and the merge of sums around fp8 products."""
    weight = quantise(zeros(outputs, inputs), "fp8")
    scaled_kernel.linear(zeros(rows, inputs), weight)
    scaled_kernel.linear(zeros(rows, inputs), weight, zeros(outputs))


def few_rows(
    outputs: int,
    size: int,
    *,
    gated: bool = False,
    added: bool = False,
    biased: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    residual = zeros(6, outputs // (1 + gated), dtype=dtype) if added else None
    bias = zeros(outputs, dtype=dtype) if biased else None
    small_linear.small_linear(
        zeros(6, size, dtype=dtype), zeros(outputs, size, dtype=dtype), bias, residual, gated=gated
    )


def experts(
    rows: int, count: int, outputs: int, size: int, kind: Kind | None = None, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Launch the grouping of rows and both products of a layer of experts, of which two have matrices."""
    x_TK, groups = zeros(rows, size, dtype=dtype), grouped_linear.group(zeros(rows, count, dtype=dtype))
    groups, plain = replace(groups, experts=2), zeros(2 * outputs, size, dtype=dtype)
    weight = plain if kind is None else quantise(plain, kind)
    grouped_linear.grouped_linear(x_TK, weight, groups, scored=True, gated=True)
    grouped_linear.grouped_linear(x_TK, weight, groups, zeros(rows, outputs, dtype=dtype))


def bookkeeping(*, cuts: bool, depth: int) -> None:
    """Launch the bookkeeping of a step of four rows."""
    state = SlotState(ints(9, 8256), ints(9), ints(9, 516), 16)
    row = floats(5)
    sampling = SamplingTables(row, ints(5), Truncation(ints(5), row, row) if cuts else None)
    rows = step_tables.begin(state, ints(5), ints(5))
    for depths in (None, ints(24)):
        packed = step_tables.pack(state, rows, sampling, ints(24), ints(24), depths, 8191)
    trees, ranked = (ints(4, 65), ints(4, 65), ints(4, 65)), ints(4, 65, 8) if depth else None
    if ranked is not None:
        step_tables.write_children(state, rows, ints(4, 8), ints(4), ints(4), 0, trees, ranked)
    verified = Verified(ints(5), ints(4, 65), packed.tokens_T, ints(24))
    done = commit_kernel.commit(state, rows, verified, ranked, ints(4), depth)
    for blocks in (None, zeros(33, 12288)):
        commit_kernel.store_states(rows, ints(5), done.out, depth, zeros(24, 12288), zeros(9, 65, 12288), blocks, 16)


LAUNCHES: dict[str, Callable[[], object]] = {
    "attention, a token": lambda: attention(1, 1, 4, 8, 128, torch.bfloat16),
    "attention, 64 chains": lambda: attention(384, 64, 4, 8, 128, torch.bfloat16),
    "attention, 256 trees": lambda: attention(256 * 17, 256, 4, 8, 128, torch.bfloat16),
    "attention, head dimension 64": lambda: attention(6, 1, 3, 3, 64, torch.bfloat16),
    "attention, head dimension 96, fp16": lambda: attention(64, 1, 1, 32, 96, torch.float16),
    "attention, fp32": lambda: attention(6, 1, 4, 8, 128, torch.float32),
    "attention, a token, fp8 cache": lambda: attention(1, 1, 4, 8, 128, torch.bfloat16, FP8),
    "kv_keep": lambda: kv_keep.kv_keep(zeros(2, 2, 3, 16, 8, 128), ints(14), ints(14), 7),
    "noise": lambda: noise.gumbel(ints(2), ints(2), VOCABULARY, 1),
    "sampling, bf16": lambda: sampling(torch.bfloat16, truncated=True),
    "sampling, fp32": lambda: sampling(torch.float32, truncated=False),
    "rounds of what was drawn": lambda: multi_round(64, drawn=True),
    "rounds of the best": lambda: multi_round(4, drawn=False),
    "rms_norm": lambda: rms_norm.rms_norm(zeros(3, 4096), zeros(4096), 1e-5, zeros(3, 4096)),
    "rms_norm without residual": lambda: rms_norm.rms_norm(zeros(3, 4096), zeros(4096), 1e-5),
    "small_linear": lambda: few_rows(6144, 4096),
    "small_linear, gated": lambda: few_rows(2 * 14336, 4096, gated=True),
    "small_linear, onto a residual": lambda: few_rows(4096, 14336, added=True),
    "small_linear, all at once": lambda: few_rows(2 * 3072, 8200, gated=True, added=True, biased=True),
    "small_linear, fp32": lambda: few_rows(2 * 4096, 4096, gated=True, dtype=torch.float32),
    "bookkeeping of a chain of 5": lambda: bookkeeping(cuts=True, depth=5),
    "bookkeeping of a plain step": lambda: bookkeeping(cuts=False, depth=0),
    "int4, an eighth of an FFN": lambda: quantised("int4", 3584, 4096),
    "int4, many outputs": lambda: quantised("int4", 16384, 576),
    "int4, fp32": lambda: quantised("int4", 32, 4096, dtype=torch.float32),
    "int8": lambda: quantised("int8", 4096, 4096),
    "int8, fp32": lambda: quantised("int8", 16384, 576, dtype=torch.float32),
    "fp8": lambda: quantised("fp8", 4096, 4096),
    "fp8, fp16": lambda: quantised("fp8", 16384, 576, dtype=torch.float16),
    "fp8, scaled products": lambda: scaled(4096, 1024, 100),
    "int4, dequantised": lambda: dequantise_kernel.dequantise(quantise(zeros(256, 4096), "int4"), torch.bfloat16),
    "int8, dequantised": lambda: dequantise_kernel.dequantise(quantise(zeros(256, 4096), "int8"), torch.bfloat16),
    "int4, zero points of groups": lambda: quantised_in_groups("int4"),
    "fp8, blocks": lambda: quantised_in_groups("fp8"),
    "fp8, dequantised": lambda: dequantise_kernel.dequantise(quantise(zeros(256, 4096), "fp8"), torch.bfloat16),
    "experts of Scout, an eighth": lambda: experts(6, 16, 2048, 5120),
    "experts of Maverick, an eighth, a prompt": lambda: experts(2048, 128, 2048, 5120),
    "experts, int4": lambda: experts(6, 16, 2048, 5120, "int4"),
    "experts, int4, a prompt": lambda: experts(2048, 16, 2048, 5120, "int4"),
    "experts, fp8": lambda: experts(6, 128, 2048, 5120, "fp8"),
    "experts, fp8, a prompt": lambda: experts(2048, 128, 2048, 5120, "fp8"),
    "experts, fp32": lambda: experts(6, 16, 2048, 5120, dtype=torch.float32),
    "silu_mul": lambda: silu_mul.silu_mul(zeros(3, 2 * 14336)),
    "rope_cache": lambda: rope(128),
    "rope_cache, head dimension 96": lambda: rope(96),
    "rope_cache, fp8 cache": lambda: rope(128, FP8),
    "draft_input": lambda: draft_input.draft_input(
        zeros(9, 4096), ints(3), zeros(5, 4096), ints(3), zeros(4096), zeros(4096), 1e-5
    ),
    "draft_input without norms": lambda: draft_input.draft_input(
        zeros(9, 4096), ints(3), zeros(5, 4096), ints(3), None, None, 0.0
    ),
}


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    JITFunction.run = compile_instead
    dispatch.has_fp8 = lambda _: TARGET.arch >= 89  # type: ignore[assignment]
    dispatch.is_hopper = lambda _: TARGET.arch >= 90  # type: ignore[assignment]
    launches = {}
    for name, launch in LAUNCHES.items():
        if sys.argv[2:] and not name.startswith(tuple(sys.argv[2:])):
            continue
        compiled.clear()
        launch()
        launches[name] = {
            "kernels": sorted({one["kernel"] for one in compiled}),
            "matrix": sorted(set().union(*(one["matrix"] for one in compiled))),
            **{what: max(one[what] for one in compiled) for what in FIGURES},
        }
        print(name, launches[name], file=sys.stderr, flush=True)
    json.dump(launches, sys.stdout)


if __name__ == "__main__":
    main()
