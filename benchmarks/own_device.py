"""Compare the speed of a draft in a process of its own with that of the same draft in the target's process, on a CPU.

    python benchmarks/own_device.py --out out/own_device.json

One engine has the embedded head twice, once with each placement. The same prompts run with both in turn, so the texts
are equal and the load of other work is shared. Rates count from the step in which the last prompt has its first token;
first tokens are timed apart, because the draft process runs over prompts while the target goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

from specdecode_worker.commands.bench import QUESTIONS
from specdecode_worker.commands.flags import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specdecode_worker.commands.local_engine import LocalEngine
from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, NamedDraft, TreeShape, WorkerConfig
from specdecode_worker.models.fetch import default_cache_dir
from specdecode_worker.sampling.params import Sampling

PLACEMENTS = {"shared": "", "own": "own"}
"""Name of the draft by its placement."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", type=TreeShape.parse, default=TreeShape.chain(3))
    parser.add_argument("--concurrency", type=int, nargs="+", default=(1, 4))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    head = DraftConfig(method="eagle3", uri=EMBEDDED_DRAFT, required=True)
    engine = LocalEngine(
        WorkerConfig(
            model=ModelConfig(uri=EMBEDDED_TARGET, served_name="embedded", dtype="bfloat16", max_model_len=1024),
            draft=head,
            drafts=(NamedDraft(name="own", placement="own", **head.model_dump(exclude={"placement"})),),
            engine=EngineConfig(device="cpu", max_num_seqs=max(args.concurrency)),
        ),
        default_cache_dir(),
    )
    results = [measure(engine, args, count) for count in args.concurrency]
    drafter: Any = engine.engine._drafts.loaded("own").drafter  # type: ignore[union-attr]
    process_bytes = private_bytes(drafter._supervisor._process.pid)
    document = {"cores": len(os.sched_getaffinity(0)), "process_bytes": process_bytes, "runs": results}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document, indent=2))


def measure(engine: LocalEngine, args: argparse.Namespace, count: int) -> dict[str, Any]:
    """Return the rates of both placements with ``count`` requests at once, and the median of their ratios."""
    prompts = [engine.prompt({"messages": [{"role": "user", "content": text}]}) for text in QUESTIONS[:count]]
    sampling = [
        Sampling(max_tokens=args.tokens, seed=index, temperature=0.0, ignore_eos=True) for index in range(count)
    ]
    rates: dict[str, list[float]] = {placement: [] for placement in PLACEMENTS}
    first: dict[str, list[float]] = {placement: [] for placement in PLACEMENTS}
    for index in range(args.rounds + 1):
        texts = []
        for placement in sorted(PLACEMENTS, reverse=bool(index % 2)):
            engine.run_shape(args.shape, PLACEMENTS[placement])
            began = time.monotonic()
            answers, timing = engine.answer(prompts, sampling, isolated=True)
            texts.append([answer.tokens for answer in answers])
            if index:  # the first round warms up
                rates[placement].append(timing.tokens_per_second)
                first[placement].append(time.monotonic() - began - timing.seconds)
        assert texts[0] == texts[1], "the text depends on the placement"
    ratios = [own / shared for own, shared in zip(rates["own"], rates["shared"], strict=True)]
    return {
        "requests": count,
        "tokens_per_second": {name: round(median(values), 2) for name, values in rates.items()},
        "first_token_seconds": {name: round(median(values), 4) for name, values in first.items()},
        "own_over_shared": [round(value, 3) for value in sorted(ratios)],
    }


def private_bytes(pid: int) -> int:
    """Return the private memory of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private"))


if __name__ == "__main__":
    main()
