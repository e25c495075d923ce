"""Suffix decoding against prompt lookup: tokens per step on an editing and on an agent-like workload.

    python benchmarks/suffix.py --out out/suffix.jsonl

Editing: each request has a text of its own and asks for it again with a change; nothing repeats between requests.
Agent: turns of agents that call tools, one after the other; answers resemble earlier answers. Both methods answer the
same requests at the same seeds, so the texts are equal. A workload with a method is one line of the output, and a run
that was stopped continues where it stopped. Drafting times are processor times of one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specdecode_worker.commands.flags import EMBEDDED_TARGET
from specdecode_worker.commands.local_engine import LocalEngine
from specdecode_worker.contract import DraftConfig, EngineConfig, Method, ModelConfig, TreeShape, WorkerConfig
from specdecode_worker.core.messages import Submit
from specdecode_worker.drafts.registry import StepProposals
from specdecode_worker.guided.grammars import json_grammar
from specdecode_worker.models.fetch import default_cache_dir
from specdecode_worker.sampling.params import Sampling

METHODS: tuple[Method, ...] = ("ngram", "suffix")
WITHIN_95_PERCENT = 1.96
FUNCTION = """def {name}({argument}s):
    total = 0
    for {argument} in {argument}s:
        if {argument}.{field} is None:
            continue
        total += {argument}.{field} * {argument}.quantity
    print("{name}", total)
    return total
"""
NAMES = (
    ("sum_prices", "item", "price", "cost"),
    ("total_weight", "parcel", "weight", "mass"),
    ("count_hours", "shift", "hours", "minutes"),
    ("add_scores", "game", "score", "points"),
    ("all_distances", "trip", "distance", "length"),
    ("sum_taxes", "invoice", "tax", "duty"),
)
TOOLS = "You are an agent for a shop. Answer each request with one JSON object: tool, arguments, and a short reason."
TURNS = (
    "Where is order 1042?",
    "Where is order 2077?",
    "Cancel order 3155, the customer changed her mind.",
    "Cancel order 1042, it arrives too late.",
    "Refund order 2077, the box was empty.",
    "Refund order 9001, the box was broken.",
    "Where is order 9001?",
    "Cancel order 5550, it was ordered twice.",
    "Refund order 3155, it was cancelled.",
    "Where is order 5550?",
)
CALL = {
    "type": "object",
    "properties": {
        "tool": {"enum": ["find_order", "cancel_order", "refund_order"]},
        "arguments": {
            "type": "object",
            "properties": {"order_number": {"type": "string", "pattern": "^[0-9]{4}$"}, "notify": {"type": "boolean"}},
            "required": ["order_number", "notify"],
        },
        "reason": {"type": "string", "maxLength": 120},
    },
    "required": ["tool", "arguments", "reason"],
}


def editing(local: LocalEngine) -> list[tuple[Sequence[int], str]]:
    """Return the prompts of the editing workload with their grammars, which are empty."""
    prompts = []
    for name, argument, before, after in NAMES:
        code = FUNCTION.format(name=name, argument=argument, field=before)
        text = f"Rename the field {before} to {after} in this code. Answer with the whole code only.\n\n{code}"
        prompts.append((local.tokenizer.chat([{"role": "user", "content": text}]), ""))
    return prompts


def agent(local: LocalEngine) -> list[tuple[Sequence[int], str]]:
    """Return the prompts of the agent's turns with their grammars."""
    head, grammar = {"role": "system", "content": TOOLS}, json_grammar(CALL)
    return [(local.tokenizer.chat([head, {"role": "user", "content": turn}]), grammar) for turn in TURNS]


WORKLOADS: dict[str, Callable[[LocalEngine], list[tuple[Sequence[int], str]]]] = {"editing": editing, "agent": agent}


def load(method: Method) -> LocalEngine:
    """Load an engine that drafts with this method."""
    config = WorkerConfig(
        model=ModelConfig(uri=EMBEDDED_TARGET, served_name="embedded", max_model_len=1024),
        draft=DraftConfig(method=method, required=True),
        engine=EngineConfig(max_num_seqs=2, device="cpu", threads=1, kv_cache_tokens=4096),
    )
    return LocalEngine(config, default_cache_dir())


def answer(local: LocalEngine, prompts: Sequence[tuple[Sequence[int], str]], most: int) -> dict[str, Any]:
    """Answer the prompts one after the other, and return the figures."""
    steps, spent = [0] * len(prompts), [0.0]
    texts: list[list[int]] = [[] for _ in prompts]
    propose = StepProposals.propose

    def timed(*args: Any) -> Any:
        began = time.process_time()
        try:
            return propose(*args)
        finally:
            spent[0] += time.process_time() - began

    StepProposals.propose = timed  # type: ignore[method-assign]
    try:
        for index, (prompt, grammar) in enumerate(prompts):
            sampling = Sampling(max_tokens=most, seed=index, temperature=0.0, grammar=grammar)
            local.engine.add(Submit(request_id=str(index), prompt=tuple(prompt), sampling=sampling))
            while not local.engine.idle:
                for new in local.engine.step():
                    texts[index] += new.tokens
                    steps[index] += 1
    finally:
        StepProposals.propose = propose  # type: ignore[method-assign]
    tokens = [len(text) for text in texts]
    mean = sum(tokens) / sum(steps)
    error = math.sqrt(sum((made - mean * taken) ** 2 for made, taken in zip(tokens, steps, strict=True))) / sum(steps)
    return {
        "tokens_per_step": round(mean, 3),
        "bound": round(WITHIN_95_PERCENT * error, 3),
        "drafting_microseconds_per_step": round(1e6 * spent[0] / sum(steps)),
        "requests": len(prompts),
        "tokens": sum(tokens),
        "texts": texts,
    }


def main() -> None:
    """Measure the lines that the output file lacks, and print all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--shapes", default="chain:4;tree:3,2,1,1")
    parser.add_argument("--out", type=Path, default=Path("out/suffix.jsonl"))
    flags = parser.parse_args()
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(text) for text in flags.out.read_text().splitlines()] if flags.out.exists() else []
    have = {(row["workload"], row["shape"], row["method"]) for row in done}
    print("| workload | shape | method | tokens per step | drafting, µs a step | same text |\n|" + " --- |" * 6)
    for workload, prompts_of in WORKLOADS.items():
        for shape in flags.shapes.split(";"):
            for method in METHODS:
                if (workload, shape, method) not in have:
                    local = load(method)
                    local.run_shape(TreeShape.parse(shape))
                    figures = answer(local, prompts_of(local), flags.max_tokens)
                    done.append({"workload": workload, "shape": shape, "method": method, **figures})
                    with flags.out.open("a") as file:
                        file.write(json.dumps(done[-1]) + "\n")
                row = next(r for r in done if (r["workload"], r["shape"], r["method"]) == (workload, shape, method))
                first = next(r for r in done if r["workload"] == workload)
                print(
                    f"| {workload} | {shape} | {method} | {row['tokens_per_step']:.2f} ± {row['bound']:.2f} "
                    f"| {row['drafting_microseconds_per_step']} | {row['texts'] == first['texts']} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
