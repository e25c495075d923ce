"""Would a price on nodes pay? Chains cut by what the head said of itself, against chains of one depth.

    python benchmarks/pricing/weigh.py out/confidence.npz --out benchmarks/results/pricing

A worker that prunes verifies a node only if its survival is at least the price. Survival is the
product of acceptance along the path, out of tables by depth and by what is known of the token:

    none     depth alone: all requests run one chain, as plan rows without tasks do
    task     depth and task: as plan rows by task do
    top      depth and the draft's probability of its proposal, in bins
    margin   depth and the distance of the two best scores, noise included, in bins
    top+task, margin+task

Tables and the choice of depth and price come from three quarters of the prompts, what they bring from the others, in
turns. Time per token is that of a full batch: the step of as many verified tokens and draft passes over tokens per
step; step times are those of the simulator's tables. Every policy has the same draft passes to pay for: pruning
saves verification. ``stop`` is margin+task where a worker also stops drafting once all of its requests are below the
price, which asks it to look at the scores between two passes. ``truth`` is no policy but the bound of all of them:
every request drafts and verifies just those tokens that will be accepted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdecode_simulator.records.step_times import StepTable, published, recorded

DEPTH = 7
BINS = 8
FOLDS = 4
PRICES = (0.0, 0.02, 0.05, 0.08, 0.12, 0.16, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 512
_PRIOR = 30.0
"""Drafts that a task's bin borrows from all tasks."""
_RECORDINGS = Path(__file__).parents[1] / "recordings"


@dataclass(frozen=True, slots=True)
class Answer:
    """One recorded answer; arrays are [roots, DEPTH]."""

    hit: np.ndarray
    margin: np.ndarray
    top: np.ndarray
    domain: str


@dataclass(frozen=True, slots=True)
class Ran:
    """What walking answers with one chain depth and price came to."""

    depth: int
    price: float
    steps: int
    tokens: int
    verified: int
    passes: tuple[int, ...]
    """[passes] how many steps wanted so many draft passes."""

    def per_token(self, table: StepTable, batch: int, *, stopping: bool = False) -> float:
        verify = batch * (1 + self.verified / self.steps)
        passes = self._deepest(batch) if stopping else float(self.depth)
        return table.seconds(batch, verify, passes, batch * CONTEXT) * self.steps / self.tokens

    def _deepest(self, batch: int) -> float:
        """Mean passes of a step in which the most demanding of ``batch`` requests decides."""
        below = np.cumsum(self.passes) / self.steps
        return float(sum(1 - share**batch for share in below))


def main() -> None:
    args = _arguments()
    data = np.load(args.confidence)
    tables = _tables()
    document: dict[str, Any] = {
        "command": f"python benchmarks/pricing/weigh.py {args.confidence.name}",
        "draft": str(data["draft"]),
        "date": args.date,
        "temperatures": {},
    }
    for temperature in sorted(set(data["temperatures"].tolist())):
        answers = _answers(data, temperature)
        document["temperatures"][str(temperature)] = {
            "answers": len(answers),
            "calibration": _calibration(answers),
            "time_per_token": _weighed(answers, tables),
        }
    args.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    text = _told(document)
    args.out.with_suffix(".md").write_text(text)
    _plot(document, args.out.with_suffix(".png"))
    print(text)


def _tables() -> dict[str, StepTable]:
    cpu = json.loads((_RECORDINGS / "steps-smollm2-cpu.json").read_text())
    gpus = json.loads((_RECORDINGS / "steps-composed.json").read_text())
    return {"smollm2-cpu": recorded(cpu), **published(gpus)}


def _answers(data: Mapping[str, Any], temperature: float) -> list[Answer]:
    ends = np.cumsum(data["lengths"])
    columns = {name: data[name] for name in ("hit", "margin", "top")}
    return [
        Answer(**{name: column[end - length : end] for name, column in columns.items()}, domain=str(domain))
        for end, length, domain, at in zip(ends, data["lengths"], data["domains"], data["temperatures"], strict=True)
        if at == temperature
    ]


Known = Callable[[Answer], np.ndarray]
"""What is known of every token of an answer, [roots, DEPTH]; larger is surer."""

_KNOWN: dict[str, tuple[Known, bool]] = {
    "none": (lambda answer: np.zeros_like(answer.top), False),
    "task": (lambda answer: np.zeros_like(answer.top), True),
    "top": (lambda answer: answer.top, False),
    "margin": (lambda answer: answer.margin, False),
    "top+task": (lambda answer: answer.top, True),
    "margin+task": (lambda answer: answer.margin, True),
}


class Tables:
    """Acceptance by depth, bin and, where asked, task, fitted to answers wherever the parents were right."""

    def __init__(self, answers: Sequence[Answer], known: Known, by_task: bool) -> None:
        self._known, self._by_task = known, by_task
        self._edges = [self._quantiles(answers, depth) for depth in range(DEPTH)]
        pooled = self._rates(answers, None)
        domains = sorted({answer.domain for answer in answers})
        self._rate = {name: self._rates([a for a in answers if a.domain == name], pooled) for name in domains}
        self._pooled = pooled

    def survival(self, answer: Answer) -> np.ndarray:
        """[roots, DEPTH] of every node of a chain."""
        rates = self._rate.get(answer.domain, self._pooled) if self._by_task else self._pooled
        bins = self._bins(answer)
        at = np.stack([rates[depth][bins[:, depth]] for depth in range(DEPTH)], axis=1)
        return np.cumprod(at, axis=1)

    def _quantiles(self, answers: Sequence[Answer], depth: int) -> np.ndarray:
        reached = np.concatenate([self._known(a)[_reached(a)[:, depth], depth] for a in answers])
        if not reached.size:
            raise SystemExit(f"error: no draft of these answers reached depth {depth + 1}; record longer answers")
        return np.unique(np.quantile(reached, np.linspace(0, 1, BINS + 1)[1:-1]))

    def _bins(self, answer: Answer) -> np.ndarray:
        known = self._known(answer)
        columns = [np.searchsorted(self._edges[depth], known[:, depth], side="right") for depth in range(DEPTH)]
        return np.stack(columns, axis=1)

    def _rates(self, answers: Sequence[Answer], pooled: np.ndarray | None) -> np.ndarray:
        """[DEPTH, bins]; bins of a task lean on those of all tasks."""
        hits, counts = np.zeros((DEPTH, BINS + 1)), np.zeros((DEPTH, BINS + 1))
        for answer in answers:
            bins, reached = self._bins(answer), _reached(answer)
            for depth in range(DEPTH):
                there = bins[reached[:, depth], depth]
                counts[depth] += np.bincount(there, minlength=BINS + 1)
                hits[depth] += np.bincount(there, weights=answer.hit[reached[:, depth], depth], minlength=BINS + 1)
        if pooled is None:
            return (hits + 1) / (counts + 2)
        return (hits + _PRIOR * pooled) / (counts + _PRIOR)


def _reached(answer: Answer) -> np.ndarray:
    """[roots, DEPTH] whether all parents of a node were right."""
    before = np.cumprod(answer.hit, axis=1)[:, :-1]
    return np.concatenate((np.ones((len(answer.hit), 1)), before), axis=1).astype(bool)


def _walk(pairs: Sequence[tuple[Answer, np.ndarray]], depth: int, price: float, beyond: int = 1) -> Ran:
    """Walk the answers. ``beyond`` is the number of nodes that are drafted and not worth their price."""
    steps = tokens = verified = 0
    passes = [0] * (DEPTH + 2)
    for answer, survival in pairs:
        learned = (survival[:, :depth] >= price).sum(axis=1)
        run = np.cumprod(answer.hit, axis=1).sum(axis=1)
        accepted, kept_list = np.minimum(run, learned).tolist(), learned.tolist()
        at = 0
        while at < len(accepted):
            steps += 1
            tokens += 1 + accepted[at]
            verified += kept_list[at]
            passes[min(kept_list[at] + beyond, depth)] += 1
            at += 1 + accepted[at]
    return Ran(depth, price, steps, tokens, verified, tuple(passes))


def _folds(answers: Sequence[Answer]) -> list[tuple[list[Answer], list[Answer]]]:
    """(fitted on, judged on); every domain is in each."""
    order = sorted(range(len(answers)), key=lambda i: answers[i].domain)
    parts = [{order[i] for i in range(at, len(order), FOLDS)} for at in range(FOLDS)]
    return [([a for i, a in enumerate(answers) if i not in part], [answers[i] for i in sorted(part)]) for part in parts]


def _weighed(answers: Sequence[Answer], tables: Mapping[str, StepTable]) -> dict[str, Any]:
    """By device and policy: for each batch that its table has, the time per token over that of plain decoding."""
    found: dict[str, dict[str, list[float]]] = {}
    grids = {name: _grids(answers, name) for name in _KNOWN}
    pairs = [(answer, np.cumprod(answer.hit, axis=1)) for answer in answers]
    runs = [_walk(pairs, depth, PRICES[-1], beyond=0) for depth in range(DEPTH + 1)]
    truth = [(runs, runs)]
    for device, table in tables.items():
        batches = [batch for batch in BATCHES if batch <= table.sequences[-1]]
        rows = {name: [_chosen(grid, table, batch) for batch in batches] for name, grid in grids.items()}
        rows["stop"] = [_chosen(grids["margin+task"], table, batch, stopping=True) for batch in batches]
        rows["truth"] = [_chosen(truth, table, batch, stopping=True) for batch in batches]
        found[device] = {name: [round(ratio, 4) for ratio in row] for name, row in rows.items()}
    return found


def _grids(answers: Sequence[Answer], name: str) -> list[tuple[list[Ran], list[Ran]]]:
    """By fold: every (depth, price) on the fitting and on the judging part."""
    known, by_task = _KNOWN[name]
    grids = []
    for fitting, judging in _folds(answers):
        tables = Tables(fitting, known, by_task)
        prices = PRICES if name != "none" else PRICES[:1]
        both = ([(a, tables.survival(a)) for a in part] for part in (fitting, judging))
        grids.append(tuple([_walk(pairs, d, p) for d in range(DEPTH + 1) for p in prices] for pairs in both))
    return grids  # type: ignore[return-value]


def _chosen(
    grid: Sequence[tuple[Sequence[Ran], Sequence[Ran]]], table: StepTable, batch: int, *, stopping: bool = False
) -> float:
    """What the best of the fitting part comes to on the judging part, over plain; tokens of all folds together."""
    seconds = plain = 0.0
    for fitted, judged in grid:
        best = min(range(len(fitted)), key=lambda i: fitted[i].per_token(table, batch, stopping=stopping))
        seconds += judged[best].per_token(table, batch, stopping=stopping) * judged[best].tokens
        plain += judged[0].per_token(table, batch) * judged[best].tokens
    return seconds / plain


def _calibration(answers: Sequence[Answer]) -> dict[str, list[list[float]]]:
    """At the first depth, by bin: how often the proposal was right; and how much a bin tells, in bits a token."""
    found = {}
    for name in ("top", "margin"):
        known = _KNOWN[name][0]
        value = np.concatenate([known(answer)[:, 0] for answer in answers])
        hit = np.concatenate([answer.hit[:, 0] for answer in answers]).astype(float)
        edges = np.quantile(value, np.linspace(0, 1, BINS + 1)[1:-1])
        bins = np.searchsorted(edges, value, side="right")
        found[name] = [
            [round(float(value[bins == b].mean()), 3), round(float(hit[bins == b].mean()), 3)] for b in range(BINS)
        ]
    return found


def _told(document: Mapping[str, Any]) -> str:
    lines = [f"`{document['command']}`, {document['date']}, draft {document['draft']}", ""]
    for temperature, part in document["temperatures"].items():
        for device, rows in part["time_per_token"].items():
            lines += [f"Temperature {temperature}, {device}: time per token over plain decoding's", ""]
            batches = BATCHES[: len(rows["task"])]
            lines += ["| batch | " + " | ".join(map(str, batches)) + " |", "|---" * (len(batches) + 1) + "|"]
            lines += [f"| {name} | " + " | ".join(f"{ratio:.3f}" for ratio in row) + " |" for name, row in rows.items()]
            lines.append("")
    return "\n".join(lines)


def _plot(document: Mapping[str, Any], path: Path) -> None:
    """What the better signal saves over rows by task, by batch."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    parts = document["temperatures"].items()
    figure, axes = plt.subplots(1, len(parts), figsize=(5 * len(parts), 3.6), sharey=True, squeeze=False)
    for panel, (temperature, part) in zip(axes[0], parts, strict=True):
        for device, rows in part["time_per_token"].items():
            best = [min(pair) for pair in zip(rows["top+task"], rows["margin+task"], strict=True)]
            saved = [100 * (1 - one / two) for one, two in zip(best, rows["task"], strict=True)]
            panel.plot(BATCHES[: len(saved)], saved, marker="o", label=device)
        panel.set_xscale("log", base=2)
        panel.set_xticks(BATCHES, BATCHES)
        panel.set_xlabel("requests in a batch")
        panel.set_title(f"temperature {temperature}")
        panel.axhline(0, color="grey", linewidth=0.5)
    axes[0][0].set_ylabel("time per token saved by pruning, %")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("confidence", type=Path, help="of record.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--date", default="", help="to write beside the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
