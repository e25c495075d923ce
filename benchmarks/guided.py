"""Guided answers of the embedded model to many JSON schemas: validity, ends, tokens per step, and the cost of masks.

    python benchmarks/guided.py SCHEMAS --count 300 --out benchmarks/results/guided.json

SCHEMAS is a folder with one folder per class of schemas, as ``data`` of JSONSchemaBench (arXiv 2501.10868,
github.com/guidance-ai/jsonschemabench). Every way of drafting answers the same requests, greedy and sampled in turn,
at concurrency 8. Texts are compared with those of plain decoding with the same grammar and seed.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import torch

from specdecode_worker.commands.common.flags import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specdecode_worker.commands.common.local_engine import LocalEngine
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
from specdecode_worker.engine.ipc.messages import Sampling, Submit
from specdecode_worker.guided.errors import GrammarRefused
from specdecode_worker.guided.grammar_compiler import GrammarCompiler
from specdecode_worker.guided.grammars import json_grammar
from specdecode_worker.guided.guide import Guide
from specdecode_worker.models.checkpoints.model_store import default_cache_dir
from specdecode_worker.speculation.sampling.token_masks import TokenMasks

CONCURRENCY = 8
LOOKUP = "lookup"
"""Name of the draft that looks up the prompt."""


@dataclass(frozen=True, slots=True)
class Case:
    """One schema with its prompt and grammar. ``kind`` is the name of its class."""

    name: str
    kind: str
    schema: Any
    prompt: tuple[int, ...]
    grammar: str


@dataclass(frozen=True, slots=True)
class Way:
    """One way of drafting: shapes by task, drafts by task, and whether the grammar drafts too."""

    name: str
    shapes: tuple[str, ...]
    drafts: tuple[str, ...] = ("",)
    forced: bool = True
    swaps: bool = False


WAYS = (
    Way("plain", ("none",), forced=False),
    Way("grammar alone", ("none",)),
    Way("chain of 3", ("chain:3",), forced=False),
    Way("chain of 3 and grammar", ("chain:3",)),
    Way("tree", ("tree:4,2,1",), forced=False),
    Way("tree and grammar", ("tree:4,2,1",)),
    Way("prompt lookup and grammar", ("chain:4",), (LOOKUP,)),
    Way("all, with swaps", ("chain:3", "tree:4,2,1", "chain:4", "tree:2,2,2"), ("", "", LOOKUP, ""), swaps=True),
)


@dataclass(slots=True)
class Result:
    """Answers of one way, with its steps and times."""

    answers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    finishes: dict[str, str] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)
    """Decoding steps by request."""
    seconds: float = 0.0
    mask_seconds: float = 0.0
    masks: int = 0
    preemptions: int = 0


def read_cases(folder: Path, count: int, longest: int, local: LocalEngine) -> tuple[list[Case], Counter[str]]:
    """Choose ``count`` schemas evenly over the classes; return them and the numbers of unusable ones by reason.

    A schema is unusable if its grammar is refused, if its prompt is too long, or if it is no valid schema.
    """
    compiler = GrammarCompiler(lambda: local.tokenizer.json, local.engine.vocab_size, local.engine.eos_token_ids)
    kinds = sorted(path.name for path in folder.iterdir() if path.is_dir())
    left = {kind: sorted((folder / kind).glob("*.json")) for kind in kinds}
    for paths in left.values():
        random.Random(29).shuffle(paths)
    cases: list[Case] = []
    skipped: Counter[str] = Counter()
    while len(cases) < count and any(left.values()):
        for kind in kinds:
            if left[kind] and len(cases) < count:
                case = read_case(left[kind].pop(), kind, longest, local, compiler)
                if isinstance(case, Case):
                    cases.append(case)
                else:
                    skipped[f"{kind}: {case}"] += 1
    return cases, skipped


def read_case(path: Path, kind: str, longest: int, local: LocalEngine, compiler: GrammarCompiler) -> Case | str:
    """Read one schema. Return the reason if it cannot be used."""
    schema = json.loads(path.read_text())
    text = json.dumps(schema)
    if len(text) > 8 * longest:
        return "too long"
    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
        grammar = json_grammar(schema)
        compiler.check(grammar)
    except jsonschema.SchemaError:
        return "no schema"
    except GrammarRefused:
        return "refused"
    content = f"Write one short example that fits this JSON schema. Answer with JSON only.\n{text}"
    prompt = local.tokenizer.chat([{"role": "user", "content": content}])
    return Case(path.stem, kind, schema, tuple(prompt), grammar) if len(prompt) <= longest else "too long"


def requests_of(cases: Sequence[Case], way: Way, max_tokens: int) -> list[Submit]:
    """Return one request for each case, greedy and sampled in turn; tasks choose among the shapes of ``way``."""
    return [
        Submit(
            request_id=case.name,
            prompt=case.prompt,
            sampling=Sampling(max_tokens=max_tokens, seed=i, temperature=0.7 if i % 2 else 0.0, grammar=case.grammar),
            task=f"t{i % len(way.shapes)}",
        )
        for i, case in enumerate(cases)
    ]


@contextmanager
def measured(result: Result, *, forced: bool) -> Iterator[None]:
    """Measure the time of masks while the block runs, and turn drafting by the grammar off without ``forced``."""
    saved = {(TokenMasks, name): getattr(TokenMasks, name) for name in ("prepare", "blocked", "load_tokens")}
    saved |= {(Guide, name): getattr(Guide, name) for name in ("forced", "advance")}
    mask = Guide.mask

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                result.mask_seconds += time.perf_counter() - began

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


def run(local: LocalEngine, cases: Sequence[Case], way: Way, max_tokens: int, version: int) -> Result:
    """Answer all cases in one way."""
    engine, result = local.engine, Result()
    tasks = tuple(TaskMatch(name=f"t{i}", draft=draft or None) for i, draft in enumerate(way.drafts * len(way.shapes)))[
        : len(way.shapes)
    ]
    rows = [
        {"concurrency": bucket, "context": 0, "task": f"t{i}", "shape": TreeShape.parse(shape)}
        for bucket in range(6)
        for i, shape in enumerate(way.shapes)
    ]
    plan = Plan(draft=engine.draft.hash, version=version, rows=rows, tasks=tasks, explore=0, guard=False)
    engine.set_plan(plan)
    before = engine.preemptions
    with measured(result, forced=way.forced):
        for submit in requests_of(cases, way, max_tokens):
            engine.add(submit)
        began, steps = time.perf_counter(), 0
        while not engine.idle:
            new = engine.step()
            steps += 1
            if way.swaps and steps % 50 == 0 and engine.load_draft is not None:
                config = DraftConfig(method="eagle3", uri=EMBEDDED_DRAFT)
                new += engine.set_draft("", engine.load_draft(config, ""))
            for one in new:
                result.answers[one.request_id] += one.tokens
                result.steps[one.request_id] += 1
                if one.finish:
                    result.finishes[one.request_id] = one.finish
        result.seconds = time.perf_counter() - began
    result.preemptions = engine.preemptions - before
    return result


def is_valid(local: LocalEngine, case: Case, answer: Sequence[int]) -> bool:
    """Return whether an answer is JSON that fits its schema under the package jsonschema."""
    try:
        value = json.loads(local.tokenizer.decode(answer))
        validator = jsonschema.validators.validator_for(case.schema)
        return bool(validator(case.schema).is_valid(value))
    except ValueError:
        return False


def summary(local: LocalEngine, cases: Sequence[Case], result: Result, plain: Result) -> dict[str, Any]:
    """Return the figures of one way, in total and by class."""
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for case in cases:
        answer = result.answers[case.name]
        ended = result.finishes[case.name] == "stop"
        for counts in (by_kind["all"], by_kind[case.kind]):
            counts["answers"] += 1
            counts["ended"] += ended
            counts["valid"] += ended and is_valid(local, case, answer)
            counts["errors"] += result.finishes[case.name] not in ("stop", "length")
            counts["other_text"] += answer != plain.answers[case.name]
            counts["tokens"] += len(answer)
            counts["steps"] += result.steps[case.name]
    return {
        "seconds": round(result.seconds, 2),
        "mask_share": round(result.mask_seconds / result.seconds, 4),
        "microseconds_per_mask": round(1e6 * result.mask_seconds / max(result.masks, 1), 1),
        "preemptions": result.preemptions,
        "classes": {
            kind: {**counts, "tokens_per_step": round(counts["tokens"] / max(counts["steps"], 1), 3)}
            for kind, counts in by_kind.items()
        },
    }


def main() -> None:
    """Run all ways, print one line each, and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--max-prompt-tokens", type=int, default=900)
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-cache-tokens", type=int, default=0, help="small values cause preemptions")
    parser.add_argument("--ways", default="", help="names of ways, separated by commas; all if empty")
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    most = flags.max_prompt_tokens + flags.max_tokens + 8
    config = WorkerConfig(
        model=ModelConfig(uri=EMBEDDED_TARGET, served_name="embedded", dtype=flags.dtype, max_model_len=most),
        draft=DraftConfig(method="eagle3", uri=EMBEDDED_DRAFT, required=True),
        drafts=(NamedDraft(name=LOOKUP, method="ngram"),),
        engine=EngineConfig(
            max_num_seqs=flags.concurrency,
            device="cpu",
            threads=torch.get_num_threads(),
            kv_cache_tokens=flags.kv_cache_tokens or flags.concurrency * (most + 64),
        ),
    )
    local = LocalEngine(config, default_cache_dir())
    cases, skipped = read_cases(flags.schemas, flags.count, flags.max_prompt_tokens, local)
    wanted = [way for way in WAYS if not flags.ways or way.name in ("plain", *flags.ways.split(","))]
    results: dict[str, Any] = {"cases": len(cases), "skipped": dict(skipped), "arguments": vars(flags), "ways": {}}
    plain: Result | None = None
    for version, way in enumerate(wanted, start=1):
        result = run(local, cases, way, flags.max_tokens, version)
        plain = plain or result
        figures = results["ways"][way.name] = summary(local, cases, result, plain)
        print(way.name, {**figures, "classes": figures["classes"]["all"]}, flush=True)
    if flags.out:
        flags.out.write_text(json.dumps(results, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
