"""What must be shown, as a table in code, and what rows say of it. Pure: rows in, verdicts out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Found = Iterator[tuple[str, float | None, bool]]
"""(case, measured, synthetic)"""
SGLANG = "SpecBundle, SGLang on one H200"
"""Llama-3.1-8B: 190 plain, 404 and 447 with chains of 3 and 5 at 2.90 and 3.52 tokens a step. SGLang's documentation
has 158, 244 (EAGLE-2) and 373 (EAGLE-3) on one H100. Both are of whole servers with trained drafts."""
PAPER = "arXiv 2508.08192"


@dataclass(frozen=True, slots=True)
class Target:
    """``bound`` is the most that ``of`` may find, or the least where ``at_least``; None is a figure without a goal.

    ``anchor`` is what others published, in the figure's unit, with its source."""

    name: str
    bound: float | None
    of: Callable[[Sequence[Row]], Found]
    at_least: bool = False
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``met`` None: nothing was measured, or there is no goal."""

    target: str
    case: str
    bound: float | None
    at_least: bool
    anchor: str
    measured: float | None
    met: bool | None
    synthetic: bool


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Every target has a verdict at least, also where nothing was measured."""
    found = []
    for target in TARGETS:
        cases = list(target.of(rows)) or [("not measured", None, False)]
        for case, measured, synthetic in cases:
            met = None
            if measured is not None and target.bound is not None:
                met = measured >= target.bound if target.at_least else measured <= target.bound
            found.append(
                Verdict(target.name, case, target.bound, target.at_least, target.anchor, measured, met, synthetic)
            )
    return found


def _of_kind(kind: str, case: Callable[[Row], str], figure: str) -> Callable[[Sequence[Row]], Found]:
    """A figure of every row of a kind."""

    def of(rows: Sequence[Row]) -> Found:
        for row in rows:
            if row["kind"] == kind and row.get(figure) is not None:
                yield case(row), row[figure], row.get("synthetic", False)

    return of


def _steps(rows: Sequence[Row], kind: str = "step", *, short: bool = False) -> list[Row]:
    """Return the rows of Llama-3.1-8B as it is served: with graphs, and the draft in bf16."""
    contexts = {row["context"] for row in rows if row["kind"] == "step" and row["stage"] == "engine-8b"}
    context = min(contexts, default=0) if short else max(contexts, default=0)
    mine = [
        row
        for row in rows
        if row["kind"] == kind and row["stage"] in ("engine-8b", "engine-8b-batches") and row["context"] == context
    ]
    return sorted(mine, key=lambda row: (row["batch"], row["shape"]))


def _roofline(shape: str, *, short: bool = False) -> Callable[[Sequence[Row]], Found]:
    def of(rows: Sequence[Row]) -> Found:
        for row in _steps(rows, short=short):
            if row["shape"] == shape and "over_roofline" in row:
                yield _step_case(row), row["over_roofline"], row["synthetic"]

    return of


def _per_second(shape: str) -> Callable[[Sequence[Row]], Found]:
    """Tokens per second of one text of little context: of plain decoding, or at the published tokens per step."""

    def of(rows: Sequence[Row]) -> Found:
        for row in _steps(rows, short=True):
            if row["shape"] == shape:
                plain = 1e3 / row["step_milliseconds"]
                yield _step_case(row), row.get("tokens_per_second_at_3_52", plain), row["synthetic"]

    return of


def _step_case(row: Row) -> str:
    return f"batch {row['batch']}, {row['context']} tokens"


def _tree(nodes: int) -> Callable[[Sequence[Row]], Found]:
    """Attention of a tree over that of the prefix pass, one token of each text."""

    def of(rows: Sequence[Row]) -> Found:
        for row in rows:
            if row["kind"] == "attention" and row["nodes"] == nodes:
                yield _attention_case(row), row["over_prefix_pass"], False

    return of


def _without_over_with(kind: str, switch: str) -> Callable[[Sequence[Row]], Found]:
    """A step without what ``switch`` says over one with it."""

    def of(rows: Sequence[Row]) -> Found:
        found = {(row["shape"], row[switch]): row["step_milliseconds"] for row in rows if row["kind"] == kind}
        for shape, on in found:
            if on and (shape, False) in found:
                yield shape, found[shape, False] / found[shape, True], shape != "plain"

    return of


def _two_drafts(rows: Sequence[Row]) -> Found:
    """A step of a worker with two drafts over one with one."""
    mine = [row for row in rows if row["kind"] == "drafts"]
    one = {(row["batch"], row["shape"]): row["step_milliseconds"] for row in mine if row["drafts"] == 1}
    for row in mine:
        at = row["batch"], row["shape"]
        if row["drafts"] == 2 and at in one:
            yield f"batch {at[0]}, {at[1]}", row["step_milliseconds"] / one[at], row["synthetic"]


def _memory_case(row: Row) -> str:
    return f"{row['sampler']}, batch {row['batch']}, {row['shape']}"


def _peak_gigabytes(rows: Sequence[Row]) -> Found:
    for row in rows:
        if row["kind"] == "memory":
            yield _memory_case(row), row["peak_bytes"] / 1e9, True


def _flash_decode(rows: Sequence[Row]) -> Found:
    """Over an unmasked decode of the same prefix, where FlashInfer is installed."""
    for row in rows:
        if row["kind"] == "attention" and row["flash_decode_microseconds"]:
            yield _attention_case(row), row["microseconds"] / row["flash_decode_microseconds"], False


def _copy_share(rows: Sequence[Row]) -> Found:
    """Where it is not."""
    for row in rows:
        if row["kind"] == "attention" and not row["flash_decode_microseconds"] and "share_of_copy_rate" in row:
            yield _attention_case(row), row["share_of_copy_rate"], False


def _chunks(rows: Sequence[Row]) -> Found:
    """Our kernel over the fastest other way, for a chunk of a prompt."""
    for row in rows:
        times = dict(row["ways"]) if row["kind"] == "chunk attention" else {}
        ours = times.pop("kernel", None)
        if ours is not None and times:
            yield f"{row['queries']} of {row['keys']} tokens, {row['heads']} heads", ours / min(times.values()), False


def _attention_case(row: Row) -> str:
    return f"batch {row['batch']}, {row['context']} tokens, {row['nodes']} nodes"


def _sampling(figure: str) -> Callable[[Sequence[Row]], Found]:
    """The choice of as many tokens as a batch has texts, over its plain step: one short text, and the largest batch."""

    def of(rows: Sequence[Row]) -> Found:
        choices = {row["rows"]: row[figure] for row in rows if row["kind"] == "sampling"}
        short, long = ([row for row in _steps(rows, short=on) if row["shape"] == "plain"] for on in (True, False))
        for row in (*short[:1], *long[-1:]):
            if row["batch"] in choices:
                yield _step_case(row), choices[row["batch"]] / 1e3 / row["step_milliseconds"], False

    return of


def _llama_4(rows: Sequence[Row]) -> Found:
    """Steps of Llama 4 over their roofline."""
    mine = [row for row in rows if row["stage"].startswith(("engine-scout", "engine-maverick"))]
    yield from _of_kind("step", lambda row: f"{row['model']}, {row['shape']}, batch {row['batch']}", "over_roofline")(
        mine
    )


def _speedup(rows: Sequence[Row]) -> Found:
    for row in _steps(rows, "speedup"):
        yield f"batch {row['batch']}", row["speedup"], row["synthetic"]


def _product(row: Row) -> str:
    return f"{row['matrix']}, {row['rows']} rows"


def _peer(row: Row) -> str:
    return f"{row['peer']}, batch {row['batch']}, {row['context']} tokens"


def _arrivals(row: Row) -> str:
    return f"{row['shape']}, {row['requests_per_second']:.0f} requests/s of {row['prompt']} + {row['answer']} tokens"


TARGETS = (
    Target("P1 plain step over its floor, batch 1, short", 1.10, _roofline("plain", short=True)),
    Target("P1 plain decoding, tokens/s", None, _per_second("plain"), anchor=f"190 ({SGLANG})"),
    Target("P2 chain:5 over target once + draft five times, short", 1.15, _roofline("chain:5", short=True)),
    Target(
        "P2 chain:5 at 3.52 tokens a step, tokens/s",
        700,
        _per_second("chain:5"),
        at_least=True,
        anchor=f"447 ({SGLANG})",
    ),
    Target(
        "P3 chain:3 over own plain decoding, 8k, published acceptance",
        1.4,
        _speedup,
        at_least=True,
        anchor=f"1.4 to 2.0 ({PAPER})",
    ),
    *(Target(f"P4 tree of {nodes} nodes over the prefix pass", 1.1, _tree(nodes)) for nodes in (6, 21, 60)),
    Target("P5 sampling, share of a plain step", 0.03, _sampling("choice_microseconds")),
    Target("P5 sampling with top-k and top-p, share of a plain step", 0.03, _sampling("cut_choice_microseconds")),
    Target("plain step over its roofline, 8k", 1.25, _roofline("plain")),
    Target("chain:5 over its roofline, 8k", 1.15, _roofline("chain:5")),
    Target("step of Llama 4 over its roofline, short", None, _llama_4),
    Target("tree attention over FlashInfer's unmasked decode", 1.1, _flash_decode),
    Target("tree attention, share of the copy rate (no FlashInfer)", 0.85, _copy_share, at_least=True),
    Target("attention of a prompt chunk over the fastest other way", None, _chunks),
    Target("fused product over the library's and its surroundings", 1.0, _of_kind("product", _product, "over_library")),
    Target("bare product of the library over its roofline", None, _of_kind("product", _product, "bare_over_roofline")),
    Target(
        "prefill, tokens/s",
        None,
        _of_kind(
            "prefill", lambda row: f"{row['tokens']} in steps of {row['max_num_batched_tokens']}", "tokens_per_second"
        ),
    ),
    Target("TTFT p95 under mixed arrivals, ms", None, _of_kind("arrivals", _arrivals, "ttft_p95_milliseconds")),
    Target("ITL p95 under mixed arrivals, ms", None, _of_kind("arrivals", _arrivals, "itl_p95_milliseconds")),
    Target("plain step of a peer on the same card, ms", None, _of_kind("peer", _peer, "step_milliseconds")),
    Target("step without launching ahead over with it", None, _without_over_with("launch-ahead", "ahead")),
    Target("step without early starts of kernels over with them", None, _without_over_with("early-starts", "early")),
    Target("step with two drafts over one", None, _two_drafts),
    Target("step by shape and sampler, ms", None, _of_kind("memory", _memory_case, "step_milliseconds")),
    Target("memory of a step, GB", None, _peak_gigabytes),
    Target(
        "share of bf16 texts that differ from plain",
        None,
        _of_kind("texts", lambda row: f"{row['case']}, temperature {row['temperature']:g}", "share_differing"),
    ),
)
