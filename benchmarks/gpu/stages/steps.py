"""Whole steps of the engine, held against the bytes that they must read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from card import clocks
from harness import Asked, Bench, build, kv_bytes_per_token, room
from shapes import LLAMA_8B, LLAMA_70B_EIGHTH, MAVERICK_EIGHTH, SCOUT_FP8, SCOUT_INT4, TINY, TINY_4, Shapes

from specdecode_worker.models.arch import causal_lm_config, new_network
from specdecode_worker.models.unloaded import meta_init
from stages import Run
from stages.profiles import parse, profile_shape

Row = dict[str, Any]
CONTEXT = 8192
SHORT_CONTEXT = 128
BATCHES = (64, 48, 32, 16, 8, 4, 2, 1)
TOKENS_OF_CHAIN_5 = 3.52
"""Tokens per step of a chain of 5 that SGLang reports for Llama-3.1-8B with its EAGLE-3 head."""
RIGHT = "every draft is right"
MOST_PRODUCTS_ERROR = 0.02
"""Largest `products_error`. Rounding to bf16 makes it about 0.004 by an estimate, a wrong product over 0.1."""
_SPARE_BYTES = 6 * 2**30
"""Beside weights and caches: activations, graphs, what the allocator cuts off."""
_BYTES_OF_FP8_SCOUT = 120 * 2**30
"""Memory of a card that holds Scout in FP8: 112 GB of weights, and a head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """``batches`` none is the largest that fits, then 1, then what lies between."""

    shapes: tuple[str, ...]
    batches: tuple[int, ...] = ()
    context: int = CONTEXT
    eager: bool = False
    draft_quantization: str | None = None


def engine_8b(run: Run) -> Iterator[Row]:
    """One engine for all: little context first, where the weights are all that a step reads, then contexts of 8k.

    Kernels of the smallest steps are listed as soon as they were timed, since they tell most of what is slow.
    """
    short = Wanted(shapes=("plain", "chain:3", "chain:5", "tree:4,2,1"), batches=(1,), context=SHORT_CONTEXT)
    long = Wanted(shapes=short.shapes, batches=(1, 16, 64, 48, 32))
    bench = build(asked_of(run, LLAMA_8B, long))
    yield from _checked(bench)
    for shape in ("plain", "chain:5"):
        yield from _with_and_without(run, bench, shape, "early-starts", "early", bench.start_early)
    yield from _rows(run, bench, short, (1,))
    for shape in ("plain", "chain:5"):
        yield from profile_shape(bench, 1, shape, SHORT_CONTEXT, run)
    yield from _rows(run, bench, long, tuple(sorted(bench.batches)))
    yield from profile_shape(bench, 1, "plain", bench.context, run)
    for shape in ("plain", "chain:5"):
        yield from _with_and_without(run, bench, shape, "launch-ahead", "ahead", bench.launch_ahead)


def _checked(bench: Bench) -> Iterator[Row]:
    """Yield how far the products are from the library's. Raise AssertionError where a step would mean nothing."""
    error = bench.products_error
    yield {"kind": "check", "case": bench.shapes.name, "error": error, "bound": MOST_PRODUCTS_ERROR}
    if error > MOST_PRODUCTS_ERROR:
        raise AssertionError(f"results differ by {error:.3g} from the library's; a step with them would mean nothing")


def _with_and_without(
    run: Run, bench: Bench, shape: str, kind: str, switch: str, turn: Callable[[bool], None]
) -> Iterator[Row]:
    """A step with what ``turn`` turns on, and one without it."""
    for on in (True, False):
        bench.run_shape(parse(shape))
        bench.accept_as(None)
        turn(on)
        found = bench.measure(1, steps_of(run, 1), SHORT_CONTEXT)
        yield {"kind": kind, "batch": 1, "shape": shape, switch: on, **found}
    turn(True)


def engine_8b_batches(run: Run) -> Iterator[Row]:
    """Batches between those of `engine_8b`, and the kernels of larger ones."""
    wanted = Wanted(shapes=("plain", "chain:3", "chain:5"), batches=(2, 4, 8, 32))
    bench = build(asked_of(run, LLAMA_8B, wanted))
    yield from _rows(run, bench, wanted, tuple(sorted(bench.batches)))
    for batch, shape in ((8, "plain"), (8, "chain:5"), (32, "plain")):
        yield from profile_shape(bench, min(batch, bench.batches[0]), shape, bench.context, run)


def engine_8b_eager(run: Run) -> Iterator[Row]:
    yield from rows(run, LLAMA_8B, Wanted(shapes=("plain", "chain:3"), batches=(1, 16), eager=True))


def engine_8b_int4_draft(run: Run) -> Iterator[Row]:
    wanted = Wanted(shapes=("plain", "chain:3", "chain:5"), batches=(1, 16), draft_quantization="int4")
    yield from rows(run, LLAMA_8B, wanted)


def engine_70b(run: Run) -> Iterator[Row]:
    yield from rows(run, LLAMA_70B_EIGHTH, Wanted(shapes=("plain", "chain:3", "chain:5"), batches=(64, 1, 16)))


def engine_scout_int4(run: Run) -> Iterator[Row]:
    yield from _of_experts(run, SCOUT_INT4)


def engine_scout_fp8(run: Run) -> Iterator[Row]:
    """A card with less memory has the copy in int4 alone."""
    if torch.cuda.mem_get_info(run.device)[1] < _BYTES_OF_FP8_SCOUT and not run.dry:
        yield {"kind": "skipped", "case": SCOUT_FP8.name, "needs_bytes": _BYTES_OF_FP8_SCOUT}
        return
    yield from _of_experts(run, SCOUT_FP8)


def engine_maverick_eighth(run: Run) -> Iterator[Row]:
    yield from _of_experts(run, MAVERICK_EIGHTH)


def _of_experts(run: Run, shapes: Shapes) -> Iterator[Row]:
    """Steps of random tokens, of which each chooses its own experts; drafts are right as it comes."""
    wanted = Wanted(shapes=("plain", "chain:3", "chain:5"), batches=(1, 4, 16, 64), context=SHORT_CONTEXT)
    tiny = replace(TINY_4, quantization=shapes.quantization)
    asked = asked_of(run, shapes, wanted, tiny=tiny, always_right=False)
    bench = build(asked)
    yield from _checked(bench)
    yield from _rows(run, bench, wanted, bench.batches)


def rows(run: Run, shapes: Shapes, wanted: Wanted) -> Iterator[Row]:
    """A row for each shape and batch. Where something is drafted it is synthetic, and says so."""
    bench = build(asked_of(run, shapes, wanted))
    yield from _rows(run, bench, wanted, bench.batches)


def asked_of(run: Run, shapes: Shapes, wanted: Wanted, *, tiny: Shapes = TINY, **more: Any) -> Asked:
    """Return the engine to build for these rows; a tiny one in a dry run."""
    shapes = tiny if run.dry else shapes
    dtype = torch.float32 if run.dry else torch.bfloat16
    context = min(wanted.context, 64) if run.dry else wanted.context
    batches = _batches(wanted, _most(shapes, dtype, run.device, context))
    return Asked(
        shapes=shapes,
        batches=tuple({min(batch, 2): None for batch in batches}) if run.dry else batches,
        context=context,
        dtype=dtype,
        device=run.device,
        eager=wanted.eager,
        draft_quantization=wanted.draft_quantization,
        **more,
    )


def steps_of(run: Run, batch: int) -> int:
    """Steps to take the median of; as many as a text has room for."""
    return 3 if run.dry else room(batch) // 9


def _rows(run: Run, bench: Bench, wanted: Wanted, batches: tuple[int, ...]) -> Iterator[Row]:
    context = min(wanted.context, bench.context)
    common = {
        "model": bench.shapes.name,
        "note": bench.shapes.note,
        "context": context,
        "graphs": bench.engine._graphs is not None,
        "draft_quantization": wanted.draft_quantization,
    }
    for batch in batches:
        for row in _of_batch(bench, batch, wanted.shapes, context, run):
            yield {"kind": "step"} | common | row | {"clocks": clocks(), "eager_steps": bench.take_eager_steps()}


def _of_batch(bench: Bench, batch: int, shapes: tuple[str, ...], context: int, run: Run) -> Iterator[Row]:
    steps, plain = steps_of(run, batch), 0.0
    for name in shapes:
        shape = parse(name)
        bench.run_shape(shape)
        bench.accept_as(None)
        found = bench.measure(batch, steps, context)
        must_read = bench.bytes_of(batch, shape, context)
        row = {"batch": batch, "shape": name, **found, "bytes_read": must_read, "synthetic": name != "plain"}
        if run.rate:
            roofline = 1e3 * must_read / run.rate
            row |= {"roofline_milliseconds": roofline, "over_roofline": found["step_milliseconds"] / roofline}
        if name == "plain":
            plain = found["step_milliseconds"]
        else:
            row["acceptance"] = RIGHT if bench.right else "of random weights"
        if name == "chain:5" and bench.right:
            row["tokens_per_second_at_3_52"] = 1e3 * batch * TOKENS_OF_CHAIN_5 / found["step_milliseconds"]
        yield row
        if name == "chain:3" and plain and bench.right:
            yield _speedup(bench, batch, name, plain, context, run)


def _speedup(bench: Bench, batch: int, name: str, plain: float, context: int, run: Run) -> Row:
    """Chain of 3 with published acceptance, through the synthetic knob: its tokens per step over plain's one."""
    bench.accept_as(bench.shapes.profile)
    found = bench.measure(batch, steps_of(run, batch), context)
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
    fitting = [batch for batch in wanted.batches or BATCHES if batch <= most]
    return tuple(sorted(fitting, key=lambda batch: (batch != fitting[0], batch != 1, batch)))


def _most(shapes: Shapes, dtype: torch.dtype, device: torch.device, context: int) -> int:
    """Return the largest batch whose keys and values fit in the memory left by the weights: 64 on an H200, 48 on an
    H100.
    """
    head = shapes.head
    of_head = dtype.itemsize * _numbers(head)
    free = torch.cuda.mem_get_info(device)[0] - _SPARE_BYTES - of_head - _target_bytes(shapes, dtype)
    states = 3 * shapes.target["hidden_size"] * dtype.itemsize / 16
    per_token = kv_bytes_per_token(shapes, dtype) + states
    return next((batch for batch in BATCHES if batch * (context + room(batch) + 64) * per_token <= free), 1)


def _target_bytes(shapes: Shapes, dtype: torch.dtype) -> int:
    """Return the approximate bytes of the target's weights."""
    if shapes.quantization is None:
        return dtype.itemsize * _numbers(shapes.target)
    with meta_init():
        model = new_network(causal_lm_config(shapes.target))
    tables = 2 * model.lm_head.weight.numel() * dtype.itemsize
    matrices = sum(parameter.numel() for parameter in model.model.layers.parameters())
    return tables + int(matrices * {"fp8": 1.0, "int4": 0.52}[shapes.quantization])


def _numbers(config: dict[str, Any]) -> int:
    """Return the approximate number of weights in a network's matrices."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    block = 3 * hidden * inner + 2 * hidden * size * (heads + kv)
    return int(config["num_hidden_layers"] * block + 2 * hidden * config["vocab_size"])
