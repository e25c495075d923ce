"""Time of a speculative step whose rows all follow a grammar, over that of a step without grammars.

    python benchmarks/guided_cost.py --out out/guided-cost.json        # about 10 minutes on one core

The embedded model answers the same prompts with chains of 3, in turns without a grammar and with each of two: a regular
expression that permits any text, and a JSON array of strings. Counted are steps in which every row decodes. Times are
processor times, and each ratio is the median of those of the rounds. ``guide_milliseconds`` is what the grammars'
automata take of a step: host time on every device, between the draft's passes and the target's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import described

from specdecode_worker.commands.flags import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specdecode_worker.commands.local_engine import LocalEngine
from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, TreeShape, WorkerConfig
from specdecode_worker.core.messages import Submit
from specdecode_worker.guided import grammars
from specdecode_worker.guided.guide import Guide
from specdecode_worker.models.fetch import default_cache_dir
from specdecode_worker.sampling.params import Sampling

PROMPTS = Path(__file__).parent / "prompts" / "heldout.jsonl"
GRAMMARS = {
    "none": "",
    "any text": grammars.regex_grammar(r"(.|\n)*"),
    "JSON strings": grammars.json_grammar({"type": "array", "items": {"type": "string"}, "minItems": 100}),
}


def load(rows: int) -> LocalEngine:
    """Load the embedded pair on one thread."""
    config = WorkerConfig(
        model=ModelConfig(uri=EMBEDDED_TARGET, served_name="embedded", max_model_len=1024, dtype="float32"),
        draft=DraftConfig(method="eagle3", uri=EMBEDDED_DRAFT, required=True),
        engine=EngineConfig(max_num_seqs=rows, device="cpu", threads=1, kv_cache_tokens=16_384),
    )
    local = LocalEngine(config, default_cache_dir())
    local.run_shape(TreeShape.parse("chain:3"))
    return local


class GuideTimer:
    """Processor seconds in the methods of all guides since the last reading."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("mask", "advance", "forced"):
            setattr(Guide, name, self._timed(getattr(Guide, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return method(*args, **named)
            finally:
                self.seconds += time.process_time() - began

        return timed

    def read(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def step_seconds(
    local: LocalEngine, rows: int, grammar: str, max_tokens: int, timer: GuideTimer
) -> tuple[float, float]:
    """Return the median time of the steps in which all rows decode, and that of their guides."""
    engine, seconds, guided = local.engine, [], []
    launched: list[tuple[int, int]] = []
    engine.on_launch = lambda launched_rows, prefill: launched.append((launched_rows, prefill))
    for index, prompt in enumerate(local.prompts(PROMPTS)[:rows]):
        sampling = Sampling(max_tokens=max_tokens, seed=index, temperature=0.0, grammar=grammar, ignore_eos=True)
        engine.add(Submit(request_id=str(index), prompt=prompt.tokens, sampling=sampling))
    while not engine.idle:
        began = time.process_time()
        launched.clear()
        timer.read()
        engine.step()
        if launched == [(rows, 0)]:
            seconds.append(time.process_time() - began)
            guided.append(timer.read())
    return statistics.median(seconds), statistics.median(guided)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=60)
    flags = parser.parse_args()
    figures, timer = {}, GuideTimer()
    for rows in flags.rows:
        local = load(rows)
        times = [
            {name: step_seconds(local, rows, grammar, flags.max_tokens, timer) for name, grammar in GRAMMARS.items()}
            for _ in range(flags.rounds)
        ]
        for name in GRAMMARS:
            figures[f"{rows} rows, {name}"] = {
                "step_milliseconds": round(1000 * statistics.median(each[name][0] for each in times), 2),
                "ratio": round(statistics.median(each[name][0] / each["none"][0] for each in times), 3),
                "guide_milliseconds": round(1000 * statistics.median(each[name][1] for each in times), 3),
            }
            print(f"{rows} rows, {name}: {figures[f'{rows} rows, {name}']}", flush=True)
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    flags.out.write_text(json.dumps({"machine": described(), "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
