"""Whole steps of the engine over 8k of context, held against the bytes that they must read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from given import Run
from harness import ROOM, Asked, Bench, build, captures_graphs, kv_bytes_per_token
from shapes import LLAMA_8B, LLAMA_70B_EIGHTH, TINY

from specdecode_worker.contract import TreeShape

_CONTEXT = 8192
_BATCHES = (64, 48, 32, 16, 8, 4, 2, 1)
_STEPS = 24
_SPARE_BYTES = 6 * 2**30
"""Beside weights and caches: activations, graphs, what the allocator cuts off."""
RIGHT = "every draft is right"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """``batches`` none is the largest that fits, then 1, then what lies between."""

    shapes: tuple[str, ...]
    batches: tuple[int, ...] = ()
    eager: bool = False
    draft_quantization: str | None = None


def rows(run: Run, which: str, wanted: Wanted, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each shape and batch. Where something is drafted it is synthetic, and says so."""
    shapes = TINY if run.dry else {"8b": LLAMA_8B, "70b": LLAMA_70B_EIGHTH}[which]
    dtype, context = (torch.float32, 64) if run.dry else (torch.bfloat16, _CONTEXT)
    batches = (2, 1) if run.dry else _batches(wanted, _most(shapes, dtype, run.device))
    asked = Asked(
        shapes=shapes,
        batches=batches,
        context=context,
        dtype=dtype,
        device=run.device,
        folder=folder,
        eager=wanted.eager,
        draft_quantization=wanted.draft_quantization,
    )
    bench = build(asked)
    common = {
        "kind": "step",
        "model": shapes.name,
        "note": shapes.note,
        "context": context,
        "graphs": captures_graphs() and not wanted.eager,
        "draft_quantization": wanted.draft_quantization,
    }
    for batch in batches:
        for row in _of_batch(bench, batch, wanted.shapes, run):
            yield common | row


def _of_batch(bench: Bench, batch: int, shapes: tuple[str, ...], run: Run) -> Iterator[dict[str, Any]]:
    steps, plain = (3 if run.dry else _STEPS), 0.0
    for name in shapes:
        shape = TreeShape(()) if name == "plain" else TreeShape.parse(name)
        bench.run_shape(shape)
        bench.accept_as(None)
        found = bench.measure(batch, steps)
        must_read = bench.bytes_of(batch, shape.depth)
        row = {"batch": batch, "shape": name, **found, "bytes_read": must_read, "synthetic": name != "plain"}
        if run.rate:
            roofline = 1e3 * must_read / run.rate
            row |= {"roofline_milliseconds": roofline, "over_roofline": found["step_milliseconds"] / roofline}
        if name == "plain":
            plain = found["step_milliseconds"]
        else:
            row["acceptance"] = RIGHT
        yield row
        if name == "chain:3" and plain:
            yield _speedup(bench, batch, name, plain, steps)


def _speedup(bench: Bench, batch: int, name: str, plain: float, steps: int) -> dict[str, Any]:
    """Chain of 3 with published acceptance, through the synthetic knob: its tokens per step over plain's one."""
    bench.accept_as(bench.shapes.profile)
    found = bench.measure(batch, steps)
    return {
        "kind": "speedup",
        "batch": batch,
        "shape": name,
        **found,
        "plain_milliseconds": plain,
        "tokens_per_step": bench.shapes.tokens_per_step,
        "speedup": bench.shapes.tokens_per_step * plain / found["step_milliseconds"],
        "synthetic": True,
        "acceptance": f"published: {bench.shapes.tokens_per_step} tokens per step",
    }


def _batches(wanted: Wanted, most: int) -> tuple[int, ...]:
    fitting = [batch for batch in wanted.batches or _BATCHES if batch <= most]
    return tuple(sorted(fitting, key=lambda batch: (batch != fitting[0], batch != 1, batch)))


def _most(shapes: Any, dtype: torch.dtype, device: torch.device) -> int:
    """Texts whose keys and values fit beside the weights: 64 on an H200, 48 on an H100."""
    if device.type == "cpu":
        return 2
    target, head = shapes.target, shapes.head
    free = torch.cuda.mem_get_info(device)[0] - _SPARE_BYTES - dtype.itemsize * (_numbers(target) + _numbers(head))
    states = 3 * target["hidden_size"] * dtype.itemsize / 16
    per_text = (_CONTEXT + ROOM + 64) * (kv_bytes_per_token(shapes, dtype) + states)
    return next((batch for batch in _BATCHES if batch * per_text <= free), 1)


def _numbers(config: dict[str, Any]) -> int:
    """Of a network's matrices, about."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    block = 3 * hidden * inner + 2 * hidden * size * (heads + kv)
    return int(config["num_hidden_layers"] * block + 2 * hidden * config["vocab_size"])
