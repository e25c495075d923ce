"""Guided answers of the embedded model to real-world JSON schemas: validity, ends, tokens per step, cost of masks.

    python benchmarks/guided_schemas.py SCHEMAS --count 300 --out out/guided-schemas.jsonl
    python benchmarks/guided_schemas.py --report out/guided-schemas.jsonl

SCHEMAS is the folder ``data`` of JSONSchemaBench (arXiv 2501.10868, github.com/guidance-ai/jsonschemabench), or the
archive that ``--pack`` writes of it. guided_schemas.tsv names the 300 schemas of commit
ba103c73756198dd9b149ddc7db7867da7a077f6 that are answered; ``--choose`` chooses them again. They are answered in
groups; each way of drafting answers the same requests, greedy and sampled in turn, at the same seeds. Texts are
compared with those of plain decoding with the same grammar. A group is one line of the output, so a run that was
stopped continues where it stopped.

All times are processor times, because other processes may share the machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guided_cases import CHOSEN, Case, choose, is_valid, read_cases, write_archive, write_choice
from guided_report import report

from specdecode_worker.commands.flags import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specdecode_worker.commands.local_engine import LocalEngine
from specdecode_worker.contract import (
    DraftConfig,
    EngineConfig,
    ModelConfig,
    NamedDraft,
    Plan,
    TaskMatch,
    TreeShape,
    WorkerConfig,
)
from specdecode_worker.core.messages import Submit
from specdecode_worker.guided.guide import Guide
from specdecode_worker.models.fetch import default_cache_dir
from specdecode_worker.sampling.params import Sampling
from specdecode_worker.sampling.sampler import TokenMasks

LOOKUP = "lookup"
"""Name of the draft that looks up the prompt."""
STEPS_BETWEEN_SWAPS = 25
"""Number of steps after which a way with swaps loads its draft again."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way of drafting: shapes and drafts by task, and whether the grammar drafts too."""

    name: str
    shapes: tuple[str, ...]
    drafts: tuple[str, ...] = ("",)
    forced: bool = True
    swaps: bool = False


WAYS = (
    Way("plain", ("none",), forced=False),
    Way("grammar", ("none",)),
    Way("chain:3", ("chain:3",), forced=False),
    Way("chain:3 + grammar", ("chain:3",)),
    Way("tree:4,2,1 + grammar", ("tree:4,2,1",)),
    Way("lookup, chain:4 + grammar", ("chain:4",), (LOOKUP,)),
    Way("mixed, swaps", ("chain:3", "tree:4,2,1", "chain:4", "tree:2,2,2"), ("", "", LOOKUP, ""), swaps=True),
)
"""All ways. The first one gives the texts that the others must equal."""


@dataclass(slots=True)
class Result:
    """Answers of one way to one group, with its steps and processor times."""

    answers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    finishes: dict[str, str] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)
    """Decoding steps by request."""
    seconds: float = 0.0
    mask_seconds: float = 0.0
    masks: int = 0
    preemptions: int = 0


def requests_of(cases: Sequence[Case], first: int, way: Way, max_tokens: int) -> list[Submit]:
    """Return one request for each case, greedy and sampled in turn; ``first`` is the index of the first case."""
    return [
        Submit(
            request_id=case.name,
            prompt=case.prompt,
            sampling=Sampling(max_tokens=max_tokens, seed=i, temperature=0.7 if i % 2 else 0.0, grammar=case.grammar),
            task=f"t{i // 2 % len(way.shapes)}",
        )
        for i, case in enumerate(cases, start=first)
    ]


@contextmanager
def measured(result: Result, *, forced: bool) -> Iterator[None]:
    """Measure the time of masks while the block runs, and turn drafting by the grammar off without ``forced``."""
    saved = {(TokenMasks, name): getattr(TokenMasks, name) for name in ("prepare", "blocked", "load_tokens")}
    saved |= {(Guide, name): getattr(Guide, name) for name in ("forced", "advance")}
    mask = Guide.mask

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args)
            finally:
                result.mask_seconds += time.process_time() - began

        return call

    def counted(self: Guide, path: Sequence[int] = ()) -> Any:
        result.masks += 1
        return mask(self, path)

    for (owner, name), function in saved.items():
        setattr(owner, name, timed(function))
    Guide.mask = counted  # type: ignore[method-assign]
    if not forced:
        Guide.forced = lambda self: ()  # type: ignore[method-assign]
    try:
        yield
    finally:
        for (owner, name), function in saved.items():
            setattr(owner, name, function)
        Guide.mask = mask  # type: ignore[method-assign]


def plan_of(way: Way, draft: str, version: int) -> Plan:
    """Return the plan of a way: the same shape at every load, by task."""
    drafts = way.drafts * (len(way.shapes) // len(way.drafts))
    return Plan(
        draft=draft,
        version=version,
        rows=[
            {"concurrency": bucket, "context": 0, "task": f"t{i}", "shape": TreeShape.parse(shape)}
            for bucket in range(6)
            for i, shape in enumerate(way.shapes)
        ],
        tasks=tuple(TaskMatch(name=f"t{i}", draft=name or None) for i, name in enumerate(drafts)),
        explore=0,
        guard=False,
    )


def run(local: LocalEngine, requests: Sequence[Submit], way: Way, version: int) -> Result:
    """Answer the requests of one group in one way."""
    engine, result = local.engine, Result()
    engine.set_plan(plan_of(way, engine.draft.hash, version))
    before = engine.report().preemptions
    with measured(result, forced=way.forced):
        for submit in requests:
            engine.add(submit)
        began, steps = time.process_time(), 0
        while not engine.idle:
            new = engine.step()
            steps += 1
            if way.swaps and steps % STEPS_BETWEEN_SWAPS == 0 and engine.load_draft is not None:
                config = DraftConfig(method="eagle3", uri=EMBEDDED_DRAFT)
                new += engine.set_draft("", engine.load_draft(config, ""))
            for one in new:
                result.answers[one.request_id] += one.tokens
                result.steps[one.request_id] += 1
                if one.finish:
                    result.finishes[one.request_id] = one.finish
        result.seconds = time.process_time() - began
    result.preemptions = engine.report().preemptions - before
    return result


def row(local: LocalEngine, cases: Sequence[Case], result: Result, plain: Result) -> dict[str, Any]:
    """Return the figures of one way for one group."""
    return {
        "seconds": round(result.seconds, 3),
        "mask_seconds": round(result.mask_seconds, 4),
        "masks": result.masks,
        "preemptions": result.preemptions,
        "answers": [
            {
                "name": case.name,
                "kind": case.kind,
                "finish": result.finishes[case.name],
                "valid": result.finishes[case.name] == "stop" and is_valid(local, case, result.answers[case.name]),
                "same": result.answers[case.name] == plain.answers[case.name],
                "tokens": len(result.answers[case.name]),
                "steps": result.steps[case.name],
            }
            for case in cases
        ],
    }


def measure(flags: argparse.Namespace) -> None:
    """Answer all groups that the output file lacks, and append them to it."""
    local = load(flags)
    if flags.choose:
        cases, skipped = choose(flags.schemas, flags.count, flags.max_prompt_tokens, local)
        write_choice(cases, flags.schemas)
        print(f"{len(cases)} schemas into {CHOSEN.name}; unusable: {dict(skipped)}")
        return
    cases = read_cases(flags.schemas, flags.count, flags.max_prompt_tokens, local)
    ways = [way for way in WAYS if not flags.ways or way.name in ("plain", *flags.ways.split(";"))]
    arguments = {key: str(value) for key, value in vars(flags).items()}
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    done = {json.loads(line)["first"] for line in flags.out.read_text().splitlines()} if flags.out.exists() else set()
    version = 0
    for first in range(0, len(cases), flags.concurrency):
        group = cases[first : first + flags.concurrency]
        if first in done:
            continue
        rows: dict[str, Any] = {}
        plain: Result | None = None
        for way in ways:
            version += 1
            result = run(local, requests_of(group, first, way, flags.max_tokens), way, version)
            plain = plain or result
            rows[way.name] = row(local, group, result, plain)
        line = {"first": first, "arguments": arguments, "ways": rows}
        with flags.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(report(flags.out), flush=True)


def load(flags: argparse.Namespace) -> LocalEngine:
    """Load an engine with the embedded draft and prompt lookup."""
    most = flags.max_prompt_tokens + flags.max_tokens + 8
    config = WorkerConfig(
        model=ModelConfig(uri=EMBEDDED_TARGET, served_name="embedded", dtype=flags.dtype, max_model_len=most),
        draft=DraftConfig(method="eagle3", uri=EMBEDDED_DRAFT, required=True),
        drafts=(NamedDraft(name=LOOKUP, method="ngram"),),
        engine=EngineConfig(
            max_num_seqs=flags.concurrency,
            device="cpu",
            threads=flags.threads,
            kv_cache_tokens=flags.kv_cache_tokens,
        ),
    )
    return LocalEngine(config, default_cache_dir())


def main() -> None:
    """Measure, or print the report of an output file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("schemas", type=Path, nargs="?")
    parser.add_argument("--choose", action="store_true", help="choose --count schemas of the folder, and stop")
    parser.add_argument("--pack", type=Path, metavar="FILE.xz", help="write the chosen schemas into one file, and stop")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--max-prompt-tokens", type=int, default=900)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-cache-tokens", type=int, default=4608, help="small values cause preemptions")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ways", default="", help="names of ways, separated by semicolons; all if empty")
    parser.add_argument("--out", type=Path, default=Path("out/guided-schemas.jsonl"))
    parser.add_argument("--report", type=Path, help="print the report of an output file, and measure nothing")
    flags = parser.parse_args()
    if flags.report:
        print(report(flags.report))
    elif flags.schemas is None:
        parser.error("give the folder of the schemas, or their archive")
    elif flags.pack:
        write_archive(flags.schemas, flags.pack)
    else:
        measure(flags)


if __name__ == "__main__":
    main()
