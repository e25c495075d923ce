"""EAGLE-3, P-EAGLE and DFlash heads at several depths and loads: tokens per step, time per token and speed-up.

    python benchmarks/draft_depths.py --head eagle3=URI --head peagle=URI --head dflash=URI --out out/draft-depths.jsonl
    python benchmarks/draft_depths.py --report out/draft-depths.jsonl --plot out/draft-depths.png

A second head of a method gets a name: ``--head shipped:eagle3=embedded://smollm2-135m-instruct-eagle3``.

One engine with the embedded target holds all heads. Each cell answers the same prompts greedily, with a fixed number of
requests at once, and its texts are compared with those of plain decoding at the same load. A cell is one line of the
output, so a run that was stopped continues where it stopped. The first line says what was measured: the machine, and
the tokens that each head was trained on, from its lineage.json.

The time per token is that of one request. Only steps without a prompt and with all requests running are timed, in
processor time of one thread, because other processes may share the machine. The speed-up is plain decoding's time per
token at the same load over that of the cell.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import described

from specdecode_worker.commands.comparison import DecodingSteps, tokens_per_step
from specdecode_worker.commands.flags import EMBEDDED_TARGET
from specdecode_worker.commands.local_engine import LocalEngine, TokenizedPrompt
from specdecode_worker.contract import (
    DraftConfig,
    Dtype,
    EngineConfig,
    ModelConfig,
    NamedDraft,
    TreeShape,
    WorkerConfig,
)
from specdecode_worker.core.messages import Submit
from specdecode_worker.models.fetch import default_cache_dir, resolve
from specdecode_worker.sampling.params import Sampling

DEPTHS = tuple(range(1, 9))
LOADS = (1, 2, 4, 8)
PLAIN = "plain"
WITHIN_95_PERCENT = 1.96
"""Standard errors on each side of a mean within which it lies with 95 % confidence."""
Cell = dict[str, Any]


@dataclass(frozen=True)
class Head:
    """A head to compare. Its name is unique among them."""

    name: str
    method: str
    uri: str

    @classmethod
    def of(cls, text: str) -> Head:
        """Read ``METHOD=URI`` or ``NAME:METHOD=URI``.

        Raises:
            ArgumentTypeError: There is no URI.
        """
        key, _, uri = text.partition("=")
        if not uri:
            raise argparse.ArgumentTypeError(f"{text!r} has no URI; write METHOD=URI or NAME:METHOD=URI")
        name, _, method = key.rpartition(":")
        return cls(name or method, method, uri)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--head",
        action="append",
        default=[],
        type=Head.of,
        metavar="[NAME:]METHOD=URI",
        help="a head; its name is the method's",
    )
    parser.add_argument("--prompts", type=Path, default=Path("benchmarks/prompts/heldout.jsonl"))
    parser.add_argument("--every", type=int, default=4, help="use every n-th prompt")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--loads", type=int, nargs="+", default=LOADS, help="requests at once")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path("out/draft-depths.jsonl"))
    parser.add_argument("--report", type=Path, help="print the tables of an output file, and measure nothing")
    parser.add_argument("--plot", type=Path, help="with --report: write the speed-ups as a PNG")
    flags = parser.parse_args()
    if flags.report:
        settings, cells = read(flags.report)
        print(report(settings, cells))
        if flags.plot:
            plot(cells, flags.plot)
    elif not flags.head:
        parser.error("name at least one --head METHOD=URI")
    else:
        measure(flags)


def measure(flags: argparse.Namespace) -> None:
    """Run all cells that the output file lacks, and append them to it."""
    heads: list[Head] = flags.head
    local = load(heads, max(flags.loads), flags.dtype)
    prompts = local.prompts(flags.prompts)[:: flags.every]
    if len(prompts) < max(flags.loads):
        raise SystemExit(f"error: {len(prompts)} prompts cannot be {max(flags.loads)} requests at once")
    settings = {"settings": described() | {
        "prompts": len(prompts),
        "max_tokens": flags.max_tokens,
        "dtype": flags.dtype,
        "trained_tokens": {head.name: trained_tokens(head.uri) for head in heads},
    }}  # fmt: skip
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    if not flags.out.exists():
        append(flags.out, settings)
    before, done = read(flags.out)
    if {**before, "date": ""} != {**settings["settings"], "date": ""}:
        raise SystemExit(f"error: {flags.out} is of another run ({before}); name another --out")
    have = {(cell["method"], cell["depth"], cell["load"]) for cell in done}
    plain = {cell["load"]: cell["answers"] for cell in done if cell["method"] == PLAIN}
    for method, depth, at_once in cells_of([head.name for head in heads], flags.depths, flags.loads):
        if (method, depth, at_once) in have:
            continue
        shape = TreeShape.chain(depth) if depth else TreeShape.parse("none")
        local.run_shape(shape, "" if method in (PLAIN, heads[0].name) else method)
        cell, answers = answer(local, prompts, at_once, flags.max_tokens)
        plain.setdefault(at_once, answers)
        same = sum(one == other for one, other in zip(answers, plain[at_once], strict=True))
        found = {"method": method, "depth": depth, "load": at_once, **cell, "same_text": same}
        append(flags.out, found | ({"answers": answers} if method == PLAIN else {}))
        print(found, flush=True)


def cells_of(methods: Sequence[str], depths: Sequence[int], loads: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    """Yield method, depth and load of every cell; plain decoding comes first at each load."""
    for at_once in loads:
        yield PLAIN, 0, at_once
        yield from ((method, depth, at_once) for depth in depths for method in methods)


def load(heads: Sequence[Head], most: int, dtype: Dtype) -> LocalEngine:
    """Load an engine with all heads, for at most this many requests at once. The first head is the default draft."""
    first, *others = heads
    config = WorkerConfig(
        model=ModelConfig(uri=EMBEDDED_TARGET, served_name="embedded", dtype=dtype, max_model_len=1024),
        draft=DraftConfig.model_validate({"method": first.method, "uri": first.uri, "required": True}),
        drafts=tuple(
            NamedDraft.model_validate({"name": head.name, "method": head.method, "uri": head.uri, "required": True})
            for head in others
        ),
        engine=EngineConfig(max_num_seqs=most, device="cpu", threads=1, kv_cache_tokens=1024 * most),
    )
    return LocalEngine(config, default_cache_dir())


def trained_tokens(uri: str) -> int | None:
    """Return the number of tokens that a head saw in training; None if it has no lineage.json."""
    path = resolve(uri, default_cache_dir()) / "lineage.json"
    if not path.is_file():
        return None
    history = json.loads(path.read_text())["history"]
    return int(history[-1]["tokens"]) if history else 0


def answer(
    local: LocalEngine, prompts: Sequence[TokenizedPrompt], at_once: int, most: int
) -> tuple[Cell, list[list[int]]]:
    """Answer all prompts with ``at_once`` of them running; return the figures and the answers."""
    engine, decoding = local.engine, DecodingSteps(prompts)
    answers: list[list[int]] = [[] for _ in prompts]
    launched: list[tuple[int, int]] = []
    engine.on_launch = lambda rows, prefill: launched.append((rows, prefill))
    waiting, running = list(enumerate(prompts)), 0
    seconds, tokens, steps = 0.0, 0, 0
    while waiting or not engine.idle:
        while waiting and running < at_once:
            index, prompt = waiting.pop(0)
            sampling = Sampling(max_tokens=most, temperature=0.0, seed=index)
            engine.add(Submit(request_id=str(index), prompt=prompt.tokens, sampling=sampling))
            running += 1
        launched.clear()
        began, made = time.process_time(), 0
        for new in engine.step():
            decoding.take(int(new.request_id), new)
            answers[int(new.request_id)] += new.tokens
            running, made = running - bool(new.finish), made + len(new.tokens)
        if launched == [(at_once, 0)]:
            seconds, tokens, steps = seconds + time.process_time() - began, tokens + made, steps + 1
    counts = [(len(own), sum(1 + (step.accepted or 0) for step in own)) for own in decoding.by_request]
    pace, error = tokens_per_step(counts)
    return {
        "tokens_per_step": round(pace, 4),
        "bound": round(WITHIN_95_PERCENT * error, 4),
        "milliseconds_per_token": round(1000 * seconds * at_once / max(tokens, 1), 3),
        "timed_steps": steps,
        "prompts": len(prompts),
    }, answers


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read(path: Path) -> tuple[dict[str, Any], list[Cell]]:
    """Return the settings and the cells of an output file."""
    first, *cells = [json.loads(line) for line in path.read_text().splitlines()]
    return first["settings"], cells


def report(settings: dict[str, Any], cells: Sequence[Cell]) -> str:
    """Return the tables of a run: the best depth of each method and load, then all cells."""
    trained = ", ".join(
        f"{method} {'unknown' if count is None else f'{count:,}'}"
        for method, count in settings["trained_tokens"].items()
    )
    where = f"{settings['machine']}, {settings['date']}, {settings['dtype']}"
    what = f"{settings['prompts']} prompts, at most {settings['max_tokens']} tokens, greedy"
    equal = sum(cell["same_text"] == cell["prompts"] for cell in cells)
    return "\n\n".join([
        f"{where}; {what}. Tokens that each head was trained on: {trained}. Cells with the texts of plain decoding: "
        f"{equal} of {len(cells)}.",
        best(cells),
        every(cells),
    ])  # fmt: skip


def best(cells: Sequence[Cell]) -> str:
    """Return the table of the depth with the least time per token, by load and method."""
    columns = ("requests at once", "plain, ms per token", "method", "best depth", "tokens per step", "ms per token")
    lines = [f"| {' | '.join(columns)} | speed-up |", "|" + " --- |" * (len(columns) + 1)]
    for at_once in sorted({cell["load"] for cell in cells}):
        plain = plain_of(cells, at_once)["milliseconds_per_token"]
        for method in methods_of(cells):
            mine = [cell for cell in cells if (cell["method"], cell["load"]) == (method, at_once)]
            if mine:
                cell = min(mine, key=lambda cell: cell["milliseconds_per_token"])
                lines.append(f"| {at_once} | {plain:.1f} | {method} | {cell['depth']} | {figures(cell, plain)} |")
    return "\n".join(lines)


def every(cells: Sequence[Cell]) -> str:
    """Return the table of all cells: a row for each load and depth, with three columns for each method."""
    methods = methods_of(cells)
    columns = " | ".join(f"{method}, tokens per step | ms per token | speed-up" for method in methods)
    lines = [f"| requests at once | depth | {columns} |", "|" + " --- |" * (2 + 3 * len(methods))]
    by_key = {(cell["method"], cell["depth"], cell["load"]): cell for cell in cells}
    for at_once, depth in sorted({(cell["load"], cell["depth"]) for cell in cells if cell["depth"]}):
        plain = plain_of(cells, at_once)["milliseconds_per_token"]
        found = [by_key.get((method, depth, at_once)) for method in methods]
        parts = ["| |" if cell is None else figures(cell, plain) for cell in found]
        lines.append(f"| {at_once} | {depth} | {' | '.join(parts)} |")
    return "\n".join(lines)


def figures(cell: Cell, plain: float) -> str:
    """Return tokens per step, milliseconds per token and speed-up of a cell, as columns."""
    own = cell["milliseconds_per_token"]
    return f"{cell['tokens_per_step']:.2f} ± {cell['bound']:.2f} | {own:.1f} | {plain / own:.2f}"


def plain_of(cells: Sequence[Cell], at_once: int) -> Cell:
    return next(cell for cell in cells if (cell["method"], cell["load"]) == (PLAIN, at_once))


def methods_of(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell["method"] for cell in cells if cell["method"] != PLAIN))


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Draw the speed-up over depth, one panel for each load and one line for each method."""
    from matplotlib.figure import Figure

    loads = sorted({cell["load"] for cell in cells})
    figure = Figure(figsize=(4 * len(loads), 3.6))
    for axis, at_once in zip(figure.subplots(1, len(loads), sharey=True, squeeze=False)[0], loads, strict=True):
        plain = plain_of(cells, at_once)["milliseconds_per_token"]
        for method in methods_of(cells):
            mine = [cell for cell in cells if (cell["method"], cell["load"]) == (method, at_once)]
            points = sorted((cell["depth"], plain / cell["milliseconds_per_token"]) for cell in mine)
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=method)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_title(f"{at_once} at once")
        axis.set_xlabel("depth")
    figure.axes[0].set_ylabel("speed-up over plain decoding")
    figure.axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
