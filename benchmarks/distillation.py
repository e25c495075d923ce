"""What distillation must show: recovery on shifting traffic, and a verdict that neither poison nor chance can fool.

    python benchmarks/distillation.py --recorded TRAIN_OUT/recorded --out DIR > benchmarks/results/distillation.json

A server of the embedded pair is asked questions, then tables that no draft has seen; it captures both. `before` is the
embedded head trained some steps on old text alone, `ceiling` the same steps with tables among it, `after` what
`specdecode-worker distill` makes of `before` and the capture. Then: a capture of noise, one that holds nothing but
tables to learn from, and ten pairs of drafts that differ in their seeds alone. A stage whose files are there is not run
again. About fifteen minutes on one core.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import traffic
from draft_gain import both_drafts, gains
from machine import described

from specdecode_worker.__main__ import main as command
from specdecode_worker.capture import ReadStats, Record, read_records
from specdecode_worker.capture.records import encode
from specdecode_worker.capture.segments import Retention, SegmentWriter
from specdecode_worker.commands.flags import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specdecode_worker.commands.local_engine import LocalEngine, TokenizedPrompt
from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, NamedDraft, TreeShape, WorkerConfig
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.models.fetch import default_cache_dir, resolve
from specdecode_worker.models.weights import load_causal_lm, load_head, prepare_eagle3
from specdecode_worker.training.acceptance import StepCounts
from specdecode_worker.training.artifacts import write_head
from specdecode_worker.training.conversations import Conversation, DataSet, batches
from specdecode_worker.training.distillation.judge import by_conversation
from specdecode_worker.training.distillation.pool import Weighted, compose
from specdecode_worker.training.distillation.records import read_samples, split_of
from specdecode_worker.training.distillation.students import StudentSettings, train_settings
from specdecode_worker.training.evaluation import (
    CalibratedDraft,
    Domain,
    Sample,
    compute_verdict,
    count_steps,
    step_costs,
)
from specdecode_worker.training.heads import prepare_eagle3_head
from specdecode_worker.training.trainer import Trainer

SHAPE = TreeShape.chain(3)
CPU = torch.device("cpu")
RATE = 4e-4
STAGES = ("traffic", "before", "after", "recovery", "gain", "noise", "overfit", "equal")
"""Stages in their order. All others need the first three."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recorded", type=Path, required=True, help="recorded/ of a `train` run: the old text")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60, help="of before, ceiling and after, each")
    parser.add_argument("--distill-steps", type=int, default=60, help="of after alone")
    parser.add_argument("--equal-steps", type=int, default=15)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--conversations", type=int, default=64, help="that judge, of every domain")
    parser.add_argument("--learn-from", type=int, default=120, help="new conversations")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6, help="of the gain at each number of requests at once")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="default: all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    result = {"what": __doc__.partition("\n")[0], **described(), "settings": bench.settings}
    for stage in (getattr(bench, name) for name in STAGES if name in args.stages):
        result |= bench.once(stage)
        print(f"distillation: {stage.__name__} done", file=sys.stderr, flush=True)
    print(json.dumps(result, indent=2))


class Bench:
    """The stages in turn; each adds its part to the result, which it keeps in a file of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out
        self.settings = {name: value for name, value in vars(args).items() if isinstance(value, int)}
        self.target: CausalLM = load_causal_lm(resolve(EMBEDDED_TARGET), dtype=torch.bfloat16, device=CPU)

    def once(self, stage: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        path = self.out / f"stage-{stage.__name__}.json"
        if not path.exists():
            began = time.process_time()
            found = stage()
            print(f"distillation: {time.process_time() - began:.0f} CPU seconds", file=sys.stderr)
            path.write_text(json.dumps(found))
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def traffic(self) -> dict[str, Any]:
        lines = traffic.golden_lines(self.args.conversations)
        traffic.write_lines(self.out / "golden.jsonl", lines)
        judging = {"test": self.args.conversations, "validation": 8}
        taken = {line["messages"][0]["content"] for line in lines}
        phases = [
            traffic.drawn(traffic.OLD, judging | {"train": self.args.learn_from // 3}, taken),
            traffic.drawn(traffic.NEW, judging | {"train": self.args.learn_from}, taken),
        ]
        traffic.served(self.out / "capture", phases, self.args.max_tokens)
        return {"captured": len(self._records()), "asked": sum(map(len, phases))}

    def before(self) -> dict[str, Any]:
        """What is deployed when the traffic shifts: a draft that never saw the new domain."""
        head = self._trained(self._head(resolve(EMBEDDED_DRAFT)), [], seed=0, steps=self.args.steps)
        write_head(head, self.out / "before")
        return {}

    def after(self) -> dict[str, Any]:
        return {"shift": self._distilled("after", self.out / "capture", "--replay", str(self._old()))}

    def recovery(self) -> dict[str, Any]:
        """Tokens per step on the new domain's test texts, by replay, and by the real engine on some of them."""
        ceiling = self._trained(self._head(resolve(EMBEDDED_DRAFT)), self._new(), seed=0, steps=self.args.steps)
        write_head(ceiling, self.out / "ceiling")
        samples = [s for s in read_samples(self.out / "after" / "data" / "test") if s.record.task == traffic.NEW]
        heads = {"before": self.out / "before", "after": self.out / "after" / "head", "ceiling": self.out / "ceiling"}
        pace = {name: self._pace(self._loaded(folder), samples) for name, folder in heads.items()}
        gained = (pace["after"] - pace["before"]) / (pace["ceiling"] - pace["before"])
        return {"recovery": round(gained, 3), "tokens_per_step": pace, "engine": self._engine(samples[:16])}

    def gain(self) -> dict[str, Any]:
        """Gain of `after` over `before` on tables, at 1, 8 and 32 requests at once in the real engine."""
        samples = [s for s in read_samples(self.out / "after" / "data" / "test") if s.record.task == traffic.NEW]
        prompts = [TokenizedPrompt(s.record.tokens[: s.record.prompt_length]) for s in samples]
        uris = [f"file://{self.out / 'before'}", f"file://{self.out / 'after' / 'head'}"]
        engine = both_drafts(*uris, 32)
        return {"gain_by_concurrency": gains(engine, prompts, (1, 8, 32), self.args.rounds, self.args.max_tokens)}

    def noise(self) -> dict[str, Any]:
        """The new domain's answers are noise."""
        generator = random.Random(0)

        def spoiled(record: Record) -> Record:
            out = [generator.randrange(self.target.config.vocab_size) for _ in range(record.output_length)]
            return msgspec.structs.replace(record, tokens=(*record.tokens[: record.prompt_length], *out))

        records = [spoiled(one) if one.task == traffic.NEW else one for one in self._records()]
        capture = self._written("noise-capture", records)
        flags = ("--replay", str(self._old()), "--steps", "15", "--min-gain", "0")
        return {"noise": self._distilled("noise", capture, *flags)}

    def overfit(self) -> dict[str, Any]:
        """Nothing but tables to learn from, nothing replayed, and a rate that spares nothing."""
        records = [one for one in self._records() if one.task == traffic.NEW or split_of(one.opening) != "train"]
        flags = ("--replay-share", "0", "--learning-rate", "3e-3", "--min-gain", "0")
        return {"overfit": self._distilled("overfit", self._written("overfit-capture", records), *flags)}

    def equal(self) -> dict[str, Any]:
        """Ten pairs of five drafts that differ in their seeds alone, judged with no gain wanted, the harshest test."""
        heads = [
            self._trained(self._head(self.out / "before"), self._new(), seed=seed, steps=self.args.equal_steps).to(
                torch.bfloat16
            )
            for seed in range(1, 6)
        ]
        samples = [
            *read_samples(self.out / "after" / "data" / "test"),
            *read_samples(self.out / "after" / "golden"),
        ]
        weights = json.loads((self.out / "after" / "verdict.json").read_text())["capture"]["mix"]
        steps = self._walked([CalibratedDraft(head) for head in heads], samples)
        found = []
        for a, b in itertools.combinations(range(len(heads)), 2):
            costs = step_costs(self.target, heads[a], heads[b], SHAPE, rounds=20)
            domains = [
                Domain(name, weights.get(name, 0.0), part[:, 0], part[:, 1 + a], part[:, 1 + b])
                for name, part in steps.items()
            ]
            verdict = compute_verdict(domains, costs, wanted_gain=0.0)
            assert verdict.mix is not None
            gain = [round(x, 4) for x in (verdict.mix.lower, verdict.mix.estimate, verdict.mix.upper)]
            found.append({"verdict": verdict.finding, "gain_of_mix": gain})
        return {"equal_pairs": {"better": sum(one["verdict"] == "better" for one in found), "pairs": found}}

    def _distilled(self, name: str, capture: Path, *flags: str) -> dict[str, Any]:
        words = ["--draft", f"file://{self.out / 'before'}", "--capture", str(capture), "--out", str(self.out / name)]
        words += ["--golden", str(self.out / "golden.jsonl"), "--max-tokens", str(self.args.max_tokens)]
        words += ["--steps", str(self.args.distill_steps), "--batch-tokens", str(self.args.batch_tokens)]
        words += [
            "--round-steps",
            str(max(self.args.distill_steps // 2, 1)),
            "--learning-rate",
            str(RATE),
            "--threads",
            "1",
        ]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            code = command(["distill", *words, *flags])
        document: dict[str, Any] = json.loads(said.getvalue())
        assert code == document["exit_code"]
        learned = ("verdict", "reasons", "gain", "domains", "step_milliseconds", "training")
        capture_kept = ("used", "dropped", "mix", "near_ties", "output_tokens")
        return {k: document[k] for k in learned} | {"capture": {k: document["capture"][k] for k in capture_kept}}

    def _trained(self, origin: Eagle3Head, new: Sequence[Conversation], *, seed: int, steps: int) -> Eagle3Head:
        """On old text, half of it replaced by ``new`` where there is any."""
        settings = StudentSettings(steps=steps, minutes=1e6, learning_rate=RATE, batch_tokens=self.args.batch_tokens,
                                 seed=seed)  # fmt: skip
        head = prepare_eagle3_head(origin, self.target, origin.target_ids.clone())
        trainer = Trainer(head, self.target.lm_head.weight, DataSet(self.out / "unused", validation=0),
                          train_settings(settings))  # fmt: skip
        for number in itertools.count():
            texts = compose([Weighted(c, 1.0) for c in new], self._old_text(), share=0.5 if new else 1.0, seed=seed,
                            number=number, tokens=20 * self.args.batch_tokens)  # fmt: skip
            for batch in batches(texts, tokens=self.args.batch_tokens, seed=seed, epoch=number):
                if trainer.progress.step == steps:
                    return trainer.master
                trainer.step([batch])
        raise AssertionError("steps come to an end")

    def _walked(self, drafts: Sequence[CalibratedDraft], samples: Sequence[Sample]) -> dict[str, np.ndarray[Any, Any]]:
        """By domain [conversations, 1 + drafts]: tokens, then each draft's steps."""
        found = {}
        for domain, conversations in by_conversation(samples).items():
            rows = []
            for turns in conversations.values():
                tallies = [self._steps(drafts, sample) for sample in turns]
                steps = [sum(each[i].steps for each in tallies) for i in range(len(drafts))]
                rows.append([sum(each[0].tokens for each in tallies), *steps])
            found[domain] = np.array(rows, np.float64)
        return found

    def _steps(self, drafts: Sequence[CalibratedDraft], sample: Sample) -> list[StepCounts]:
        return count_steps(drafts, sample, SHAPE, self.target.config)

    def _pace(self, head: Eagle3Head, samples: Sequence[Sample]) -> float:
        tallies = [self._steps([CalibratedDraft(head)], sample)[0] for sample in samples]
        return round(sum(t.tokens for t in tallies) / sum(t.steps for t in tallies), 4)

    def _engine(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The real engine on the recorded prompts with both drafts: the same text, and tokens per step as it counts."""
        uris = {"": f"file://{self.out / 'before'}", "after": f"file://{self.out / 'after' / 'head'}"}
        config = WorkerConfig(
            model=ModelConfig(uri=EMBEDDED_TARGET, served_name="m"),
            draft=DraftConfig(uri=uris[""], required=True),
            drafts=(NamedDraft(name="after", uri=uris["after"]),),
            engine=EngineConfig(max_num_seqs=len(samples), threads=1, kv_cache_tokens=16 * 256),
        )
        engine = LocalEngine(config, default_cache_dir())
        prompts = [TokenizedPrompt(s.record.tokens[: s.record.prompt_length]) for s in samples]
        wanted = [list(s.record.tokens[s.record.prompt_length :]) for s in samples]
        found: dict[str, Any] = {}
        for draft, uri in uris.items():
            engine.run_shape(SHAPE, draft)
            # A prefix that was cached while one draft ran holds no keys of the other one.
            answers, _ = engine.answer(prompts, [s.record.sampling for s in samples], isolated=True)
            same = [answer.tokens == text for answer, text in zip(answers, wanted, strict=True)]
            steps = sum(len(answer.tokens) - 1 - answer.accepted for answer in answers)
            replayed = self._pace(self._loaded(Path(uri.removeprefix("file://"))), samples)
            pace = sum(len(answer.tokens) - 1 for answer in answers) / steps
            found[draft or "before"] = {
                "tokens_per_step": round(pace, 4), "by_replay": replayed, "same_text": f"{sum(same)}/{len(same)}",
            }  # fmt: skip
        return found

    def _records(self) -> list[Record]:
        return list(read_records([self.out / "capture"], ReadStats()))

    def _written(self, name: str, records: Sequence[Record]) -> Path:
        writer = SegmentWriter(self.out / name, Retention(1e9, 2**30))
        for record in records:
            writer.append(encode(record))
        writer.close()
        return self.out / name

    def _new(self) -> list[Conversation]:
        samples = read_samples(self.out / "after" / "data" / "train")
        return [s.conversation for s in samples if s.record.task == traffic.NEW]

    def _old(self) -> Path:
        """As the --out of a `train` run, of a few of its shards."""
        folder = self.out / "old" / "recorded"
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.args.recorded.resolve().glob("shard-*"))[:3]:
            if not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
        return folder.parent

    def _old_text(self) -> list[Conversation]:
        if not hasattr(self, "_read"):
            self._read = DataSet(self._old() / "recorded", validation=24, per_domain=8)
            self._read.grow()
        return self._read.training

    def _head(self, folder: Path) -> Eagle3Head:
        return load_head(prepare_eagle3(folder, self.target), self.target, dtype=torch.float32, device=CPU)

    def _loaded(self, folder: Path) -> Eagle3Head:
        return load_head(prepare_eagle3(folder, self.target), self.target, dtype=torch.bfloat16, device=CPU)


if __name__ == "__main__":
    main()
