"""Estimate of what `make gpu` should find on a GPU: `roofline.py [--gpu H200]`. No GPU is used.

A step takes the larger of its bytes over the rate of reading and its arithmetic over the rate of the matrix units, plus
a fixed time for every launch of launches.json. The assumptions are printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from shapes import LLAMA_8B, LLAMA_70B, Shapes

LAUNCHES: dict[str, Any] = json.loads(Path(__file__).with_name("launches.json").read_text())
LAUNCH_MICROSECONDS = 3.1
"""Measured: a plain step of Llama-3.1-8B on an H200, 4.19 ms, over its floor of 3.36 ms, by its 266 launches."""
ALL_REDUCE_MICROSECONDS = 12.0
"""Of some rows on eight H100 by NCCL: an assumption, not measured; a one-shot kernel may take about 5."""
TOKENS_OF_CHAIN_5 = 3.52
CONTEXT = 8192
BYTES = 2
FEW_ROWS = 64
"""Rows up to which products are fused; more rows need the launches of the larger cases."""
ASSUMPTIONS = (
    "rate of reading: H200 as measured (4.48 TB/s), others nine tenths of their data sheet",
    "matrix units: 65 % of the dense bf16 rate of the data sheet",
    f"{LAUNCH_MICROSECONDS} us of idle memory per launch inside of a graph, as a plain step on an H200 had",
    "matrix products and attention reach that rate; nothing is read twice",
    f"chain of 5: {TOKENS_OF_CHAIN_5} tokens a step; chain of 3: {LLAMA_8B.tokens_per_step}, as published",
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """``bytes_per_second`` of reading, ``flops`` of bf16 matrix products."""

    bytes_per_second: float
    flops: float


GPUS = {
    "H200": Gpu(4.48e12, 0.65 * 989e12),
    "H100": Gpu(0.9 * 3.35e12, 0.65 * 989e12),
    "A100": Gpu(0.9 * 2.04e12, 0.65 * 312e12),
    "L40S": Gpu(0.9 * 0.864e12, 0.65 * 362e12),
}


@dataclass(frozen=True, slots=True)
class Expectation:
    """Expected figure and its goal; ``rests_on`` is the assumption that matters most."""

    figure: str
    expected: float
    goal: float
    unit: str
    rests_on: str


def _layer(shape: dict[str, Any], inputs: int) -> int:
    hidden, size = shape["hidden_size"], shape["head_dim"]
    heads = shape["num_attention_heads"] * size
    joined = heads + 2 * shape["num_key_value_heads"] * size
    return inputs * joined + heads * hidden + 3 * hidden * int(shape["intermediate_size"])


def _keys(shape: dict[str, Any]) -> int:
    """Return the numbers of the keys and values of a token in one layer."""
    return 2 * int(shape["num_key_value_heads"]) * int(shape["head_dim"])


def _collectives(layers: int, ranks: int) -> int:
    """Return the collectives of a step: two a layer, the rows' tokens to all, and the logits to one."""
    return 2 * layers + 2 if ranks > 1 else 0


SHAPES = {"plain": (1, 0), "chain:3": (4, 3), "chain:5": (6, 5), "tree:4,2,1": (21, 3)}
"""Rows that a sequence verifies, root included, and draft passes."""


@dataclass(frozen=True, slots=True)
class Dense:
    """One rank of a Llama that is split over this many. Its EAGLE-3 head is whole, as rank 0 has it."""

    shapes: Shapes
    ranks: int = 1
    layer_bytes: int = BYTES
    """Bytes of a weight of the layers; all others are bf16."""

    @property
    def name(self) -> str:
        """Model, format and split."""
        form = "fp8" if self.layer_bytes == 1 else "bf16"
        return f"{self.shapes.name}, {form}" + (f", 1 of {self.ranks}" if self.ranks > 1 else "")

    @property
    def layers(self) -> int:
        """Layers of the target."""
        return int(self.shapes.target["num_hidden_layers"])

    def floor_seconds(self, gpu: Gpu, batch: int, context: int, rows: int, passes: int) -> float:
        """Return the time of a step without launches and collectives: ``rows`` verified per sequence."""
        target, head = self.shapes.target, self.shapes.head
        hidden = target["hidden_size"]
        layers, table = self.layers * _layer(target, hidden), target["vocab_size"] * hidden
        draft = _layer(head, 2 * head["hidden_size"]) + head["draft_vocab_size"] * head["hidden_size"]
        fuse = 3 * hidden * head["hidden_size"] if passes else 0
        keys = self.layers * batch * context * _keys(target)
        read = (self.layer_bytes * layers + BYTES * (table + keys)) / self.ranks
        read += BYTES * (passes * (draft + batch * context * _keys(head)) + fuse)
        products = 2 * batch * (rows * (layers + table) / self.ranks + passes * draft)
        return max(read / gpu.bytes_per_second, products / gpu.flops)

    def launches(self, shape: str, batch: int) -> int:
        """Return the launches of a step of one of SHAPES, without collectives."""
        counted = LAUNCHES[shape]
        a_layer = counted["per_layer"]
        if batch * SHAPES[shape][0] > FEW_ROWS:
            a_layer += LAUNCHES["plain, 128 rows"]["per_layer"] - LAUNCHES["plain"]["per_layer"]
        return int(counted["outside_of_layers"] + self.layers * a_layer)

    def step_seconds(self, gpu: Gpu, shape: str, batch: int, context: int) -> float:
        """Return the expected time of a step of one of SHAPES."""
        fixed = LAUNCH_MICROSECONDS * self.launches(shape, batch)
        fixed += ALL_REDUCE_MICROSECONDS * _collectives(self.layers, self.ranks)
        return self.floor_seconds(gpu, batch, context, *SHAPES[shape]) + 1e-6 * fixed


ONE = Dense(LLAMA_8B)


def expectations(gpu: Gpu) -> Iterator[Expectation]:
    """Yield the expected figures P1 to P5."""
    plain, chain = ONE.step_seconds(gpu, "plain", 1, 0), ONE.step_seconds(gpu, "chain:5", 1, 0)
    launch = "time per launch"
    yield Expectation("P1 plain over floor", plain / ONE.floor_seconds(gpu, 1, 0, 1, 0), 1.10, "x", launch)
    yield Expectation("P2 chain of 5 over floor", chain / ONE.floor_seconds(gpu, 1, 0, 6, 5), 1.15, "x", launch)
    yield Expectation("P2 chain of 5", TOKENS_OF_CHAIN_5 / chain, 700, "tokens/s", "tokens per step")
    for batch in (1, 4, 16, 64):
        gain = LLAMA_8B.tokens_per_step * ONE.step_seconds(gpu, "plain", batch, CONTEXT)
        speedup = gain / ONE.step_seconds(gpu, "chain:3", batch, CONTEXT)
        yield Expectation(f"P3 chain of 3 over plain, batch {batch}", speedup, 1.4, "x", "tokens per step")
    for nodes in (6, 21, 60):
        yield Expectation(f"P4 tree of {nodes} over prefix", _tree_ratio(gpu, nodes), 1.1, "x", "matrix units")
    sampled = 1e-6 * 2 * LAUNCH_MICROSECONDS + BYTES * LLAMA_8B.target["vocab_size"] / gpu.bytes_per_second
    yield Expectation("P5 sampling share of a plain step", 100 * sampled / plain, 3, "%", launch)


def _tree_ratio(gpu: Gpu, nodes: int) -> float:
    """Return the attention of a layer with a tree over that of the root alone."""
    times, target = [], LLAMA_8B.target
    for rows, own in ((1, 0), (nodes, nodes)):
        read = BYTES * (CONTEXT + own) * _keys(target) / gpu.bytes_per_second
        multiplied = 4 * rows * target["num_attention_heads"] * target["head_dim"] * (CONTEXT + own) / gpu.flops
        times.append(max(read, multiplied) + 1e-6 * LAUNCH_MICROSECONDS)
    return times[1] / times[0]


# Llama 4 in FP8: one rank's step in three parts, and the step times of the simulator.

REFERENCE_MILLISECONDS = 4.0
"""Per token at batch 1 on eight H100, with EAGLE: arXiv 2508.08192."""
HIDDEN, VOCABULARY, LAYERS, NO_ROPE_LAYERS = 5120, 202_048, 48, 12
_ATTENTION = HIDDEN * (40 + 8 + 8) * 128 + 40 * 128 * HIDDEN
_EXPERT, _DENSE = 3 * HIDDEN * 8192, 3 * HIDDEN * 16384
DENSE_LAUNCHES = ("norm", "qkv", "rope", "attend", "merge", "o", "add and norm", "gate, up", "gate", "down", "add")
MOE_LAUNCHES = (*DENSE_LAUNCHES, "router", "group", "experts' gate, up", "experts' down")
OTHER_LAUNCHES = LAUNCHES["plain"]["outside_of_layers"]
LLAMA_4_HEAD = HIDDEN * (2 * 56 * 128 + 40 * 128) + _EXPERT + 32_000 * HIDDEN
"""Weights of an EAGLE-3 head with the target's heads, the width of an expert and 32,000 tokens, whole on one rank."""
KV_NODE_SHARE = 0.0756
"""Time that a node adds to the attention of a step, over that of its root: as fitted to the steps of an 8B on an H200
(benchmarks/recordings/steps-composed.json)."""


@dataclass(frozen=True, slots=True)
class Llama4:
    """Target of 48 layers, of which some have experts and the others are dense, on this many GPUs."""

    name: str
    ranks: int
    experts: int
    moe_layers: int
    norm_launches: int
    """Launches of a rotating layer for the norms of queries and keys."""

    @property
    def whole(self) -> int:
        """Weights of the layers that every token reads."""
        dense = (LAYERS - self.moe_layers) * _DENSE
        return LAYERS * _ATTENTION + dense + self.moe_layers * _EXPERT

    @property
    def launches(self) -> int:
        """Launches of a plain step of one rank."""
        layers = self.moe_layers * len(MOE_LAUNCHES) + (LAYERS - self.moe_layers) * len(DENSE_LAUNCHES)
        return layers + NO_ROPE_LAYERS + (LAYERS - NO_ROPE_LAYERS) * self.norm_launches + OTHER_LAUNCHES

    @property
    def collectives(self) -> int:
        """Collectives of a step."""
        return _collectives(LAYERS, self.ranks)


MAVERICK = Llama4("maverick", ranks=8, experts=128, moe_layers=24, norm_launches=0)
SCOUT = Llama4("scout", ranks=1, experts=16, moe_layers=48, norm_launches=2)


@dataclass(frozen=True, slots=True)
class RankStep:
    """Milliseconds of one rank's step at batch 1, without keys of the context."""

    shape: str
    bytes: float
    launches: float
    collectives: float
    tokens: float

    @property
    def per_token(self) -> float:
        """Milliseconds of a token."""
        return (self.bytes + self.launches + self.collectives) / self.tokens


def rank_step(
    gpu: Gpu, model: Llama4, depth: int, *, all_reduce: float = ALL_REDUCE_MICROSECONDS, saved_a_layer: int = 0
) -> RankStep:
    """Return the step of a chain; rows choose experts evenly. Matrices of layers are FP8, all others bf16."""
    chosen = model.experts * (1 - (1 - 1 / model.experts) ** (depth + 1))
    read = (model.whole + chosen * model.moe_layers * _EXPERT + BYTES * VOCABULARY * HIDDEN) / model.ranks
    read += depth * BYTES * LLAMA_4_HEAD
    launches = model.launches + depth * LAUNCHES["chain:3"]["per_draft_pass"] - LAYERS * saved_a_layer
    tokens = LLAMA_8B.tokens_per_step if depth else 1.0
    ms = 1e3 * read / gpu.bytes_per_second, 1e-3 * LAUNCH_MICROSECONDS * launches, 1e-3 * all_reduce * model.collectives
    return RankStep(f"chain of {depth}" if depth else "plain", *ms, tokens)


def step_figures(gpu: Gpu, model: Llama4) -> dict[str, float]:
    """Return the figures that benchmarks/recordings/steps-composed.json has of the model."""
    rate = gpu.bytes_per_second
    step = rank_step(gpu, model, 0)
    products = model.whole + model.moe_layers * _EXPERT + VOCABULARY * HIDDEN
    heads = 8 // model.ranks
    found = {
        "overhead_seconds": 1e-3 * (step.launches + step.collectives),
        "weights_seconds": (model.whole + BYTES * VOCABULARY * HIDDEN) / model.ranks / rate,
        "experts": model.experts,
        "expert_seconds": model.moe_layers * _EXPERT / model.ranks / rate,
        "token_seconds": 2 * products / model.ranks / gpu.flops,
        "kv_token_seconds": BYTES * LAYERS * 2 * heads * 128 / rate,
        "kv_node_share": KV_NODE_SHARE,
        "speculation_seconds": 0.0,
        "pass_seconds": BYTES * LLAMA_4_HEAD / rate
        + 1e-6 * LAUNCH_MICROSECONDS * LAUNCHES["chain:3"]["per_draft_pass"],
        "pass_sequence_seconds": 0.0,
        "pass_kv_token_seconds": BYTES * 2 * 8 * 128 / rate,
        "noise": 0.015,
    }
    return {name: float(f"{value:.3g}") for name, value in found.items()}


def maverick_table(gpu: Gpu) -> list[str]:
    """Return the table of Maverick in three columns, and what a change would bring."""
    steps = {
        "as it is": [rank_step(gpu, MAVERICK, 0), rank_step(gpu, MAVERICK, 3)],
        "one-shot all-reduce": [rank_step(gpu, MAVERICK, 3, all_reduce=5.0)],
        "and norm, gate and residual in the products": [rank_step(gpu, MAVERICK, 3, all_reduce=5.0, saved_a_layer=3)],
    }
    lines = [f"{'ms of one rank':44} {'':10} {'bytes':>6} {'launches':>9} {'collectives':>12} {'a token':>8}"]
    for what, rows in steps.items():
        lines += [
            f"{what:44} {step.shape:10} {step.bytes:6.2f} {step.launches:9.2f} {step.collectives:12.2f} "
            f"{step.per_token:8.2f}"
            for step in rows
        ]
    return [*lines, f"{'reference, eight H100':74}{'':10}{REFERENCE_MILLISECONDS:12.2f}"]


# Tables of benchmarks/reports/gpu-steps-2026-11-29.md.

PARTS = (ONE, Dense(LLAMA_70B, ranks=4), Dense(LLAMA_70B, ranks=2, layer_bytes=1))
SHAPES_OF_TABLE, SHORT = ("plain", "chain:5", "tree:4,2,1"), 128
RESULTS = Path(__file__).parents[1] / "results"
MEASURED = ("gpu-h200-2026-11-27-first-contact.json", "gpu-h200-2026-11-27-third.json")
"""What an H200 did before the kernels were changed, and after."""


def steps_table(gpu: Gpu) -> Iterator[str]:
    """Yield the steps of PARTS in Markdown: launches, floor, estimate, and what an H200 took."""
    before, after = (_steps_of(RESULTS / name) for name in MEASURED)
    columns = ["one rank", "shape", "batch", "context", "launches", "floor, ms", "estimate, ms", "over floor"]
    yield _row([*columns, "before, ms", "after, ms", "after, over floor"])
    yield _row(["---"] * (len(columns) + 3))
    for part, shape, batch, context in product(PARTS, SHAPES_OF_TABLE, (1, 16, 64), (SHORT, CONTEXT)):
        floor = 1e3 * part.floor_seconds(gpu, batch, context, *SHAPES[shape])
        estimate, case = 1e3 * part.step_seconds(gpu, shape, batch, context), (shape, batch, context)
        took = [part is ONE and one.get(case) for one in (before, after)]
        figures = [floor, estimate, estimate / floor, *took, took[1] and took[1] / floor]
        given = [part.name, *map(str, case), str(part.launches(shape, batch))]
        yield _row([*given, *(f"{figure:.2f}" if figure else "" for figure in figures)])


def _steps_of(path: Path) -> dict[tuple[str, int, int], float]:
    """Return the milliseconds of a file of results by shape, batch and context."""
    rows = (row for row in json.loads(path.read_text())["rows"] if row["kind"] == "step")
    return {(row["shape"], row["batch"], row["context"]): row["step_milliseconds"] for row in rows}


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def kernels_table() -> Iterator[str]:
    """Yield the time of each kernel of a step at batch 1 on an H200 in Markdown, of those over ten microseconds."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for at, name in enumerate(MEASURED):
        for row in json.loads((RESULTS / name).read_text())["rows"]:
            if row["kind"] == "kernel" and row["microseconds"] >= 10:
                kernel = row["name"].removeprefix("void at::native::").partition("<")[0].strip("_")
                key = (f"{row['shape']}, {row['context']}", kernel, f"{row['launches']:.0f}")
                found.setdefault(key, ["", ""])[at] = f"{row['microseconds']:.0f}"
    yield _row(["step at batch 1", "kernel", "launches", "before, us", "after, us"])
    yield _row(["---"] * 5)
    yield from (_row([*key, *times]) for key, times in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", choices=GPUS, default="H200")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--maverick", action="store_true", help="Llama 4 Maverick in FP8 on eight GPUs instead")
    parser.add_argument("--table", action="store_true", help="steps of 8B and of ranks of 70B, and kernels as measured")
    parser.add_argument("--steps", action="store_true", help="Llama 4's figures of recordings/steps-composed.json")
    args = parser.parse_args()
    if args.steps:
        print(json.dumps({model.name: step_figures(GPUS[args.gpu], model) for model in (SCOUT, MAVERICK)}, indent=1))
        return
    if args.table:
        print("\n".join([*steps_table(GPUS[args.gpu]), "", *kernels_table()]))
        return
    if args.maverick:
        print(f"computed for eight {args.gpu}, Maverick in FP8, batch 1 (nothing was measured)\n")
        print("\n".join(maverick_table(GPUS[args.gpu])))
        return
    expected = list(expectations(GPUS[args.gpu]))
    if args.json:
        print(json.dumps({"gpu": args.gpu, "expected": [asdict(one) for one in expected], "assumes": ASSUMPTIONS}))
        return
    print(f"expected on one {args.gpu}, Llama-3.1-8B in bf16 (an estimate, nothing was measured)\n")
    for one in expected:
        print(f"  {one.figure:38} {one.expected:8.2f} {one.unit:9} goal {one.goal:g}, rests on: {one.rests_on}")
    print("\nassumptions:")
    for assumption in ASSUMPTIONS:
        print(f"  - {assumption}")


if __name__ == "__main__":
    main()
