"""Time per token over load for fixed draft lengths, no speculation and Auto, with the shape that Auto chose.

    .venv/bin/python benchmarks/load_ramp.py --out benchmarks/reports/load-ramp         # an hour on an idle machine
    .venv/bin/python benchmarks/load_ramp.py --settle 6 --seconds 6 --loads 1 4 --out out/ramp  # a test of the command

The real engine serves the embedded model, with a number of requests in flight that goes up the loads and down again.
Auto is the operator's own `decide()`, which reads the engine's report and sets its plan every five seconds, as on a
cluster; guard and exploration run. After a change of load Auto serves it alone and unmeasured for as long as --settle
says. Then all ways take turns of a few seconds, the fixed shapes in one engine of theirs, so that a machine that gets
slower or faster meanwhile favors none. Writes STEM.json and STEM.svg, and prints a table by load with the speed of Auto
over that of the best fixed shape. A time per token is that of one request: wall time times requests over tokens. That
of the best fixed shape is the least of several that err, so that Auto at the same shape is rather below 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from machine import described

from specdecode_operator.api.v1alpha1 import Spec, Status
from specdecode_operator.decision.decide import decide
from specdecode_operator.state.learned import LearnedState, Session
from specdecode_operator.types import Defaults, Deployment, Observation, Workload
from specdecode_operator.types import Worker as Seen
from specdecode_worker.commands.bench import QUESTIONS
from specdecode_worker.commands.flags import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specdecode_worker.commands.local_engine import LocalEngine
from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, TreeShape, WorkerConfig
from specdecode_worker.core.messages import Submit
from specdecode_worker.engine.calibration import calibrate
from specdecode_worker.models.fetch import default_cache_dir
from specdecode_worker.sampling.params import Sampling

matplotlib.use("Agg")
from matplotlib import pyplot

POLL_SECONDS = 5.0
SLICE_SECONDS = 6.0
"""Length of a turn, in seconds."""
CALIBRATION_SECONDS = 30.0
FIXED = ("none", "chain:1", "chain:2", "chain:3", "tree:2,1")
UID = "load-ramp"
DEFAULTS = Defaults(worker_image="localhost/worker:1", worker_image_pull_policy="IfNotPresent")


@dataclass(slots=True)
class Stage:
    """Seconds, tokens and the shape at the end of one load of one way."""

    load: int
    seconds: float = 0.0
    tokens: int = 0
    shape: str = ""
    reasons: list[str] = field(default_factory=list)

    @property
    def milliseconds_per_token(self) -> float:
        return 1000 * self.seconds * self.load / max(self.tokens, 1)


class Operator:
    """The operator's decisions for the one engine, without a cluster."""

    def __init__(self, local: LocalEngine, most: int) -> None:
        spec = {
            "model": {"uri": EMBEDDED_TARGET},
            "speculation": {"method": "eagle3", "draft": {"uri": EMBEDDED_DRAFT}, "depth": {"max": 5}},
            "workers": {"accelerator": {"count": 0}},
            "engine": {"maxNumSeqs": most},
        }
        self._deployment = Deployment(
            namespace="default", name=UID, uid=UID, generation=1, spec=Spec.model_validate(spec), status=Status()
        )
        self._memory = Session(learned=LearnedState(uid=UID))
        self._local = local
        self._last = 0.0
        self.clock = 1e9
        """Seconds that Auto's engine has served: it knows nothing of the turns of others."""
        self.reasons: list[str] = []
        self.plan: Any = None

    def poll(self, *, report: bool = True) -> None:
        """Decide on the engine's report, and set a new plan."""
        one = Seen(
            name="pod",
            uid="pod",
            address="127.0.0.1",
            ready=True,
            report=self._local.engine.report() if report else None,
        )
        workload = Workload(generation=1, observed_generation=1, wanted=1, replicas=1, updated=1, ready=1, available=1)
        observed = Observation(workload=workload, workers=(one,), session=self._memory)
        decision, self._memory = decide(self._deployment, observed, DEFAULTS, now=self.clock)
        self.reasons += [str(change.reason) for change in decision.changes if change.kind == "Plan"]
        if self.plan is None or decision.plan.version != self.plan.version:
            self.plan = decision.plan
            self._local.engine.set_plan(decision.plan)
        self._last = self.clock

    def served(self, seconds: float) -> None:
        """Count the time of a step, and poll if that is due."""
        self.clock += seconds
        if self.clock - self._last >= POLL_SECONDS:
            self.poll()

    def shape(self, load: int, context: int) -> str:
        """Return the planned shape at a load."""
        edges = self.plan.buckets
        return str(self.plan.shape(bisect_left(edges.concurrency, load), bisect_left(edges.context, context), "other"))


class Server:
    """An engine with a number of requests in flight."""

    def __init__(self, most: int, max_tokens: int) -> None:
        config = WorkerConfig(
            model=ModelConfig(uri=EMBEDDED_TARGET, served_name="embedded", dtype="bfloat16"),
            draft=DraftConfig(method="eagle3", uri=EMBEDDED_DRAFT, required=True),
            engine=EngineConfig(device="cpu", max_num_seqs=most),
        )
        self.local = LocalEngine(config, default_cache_dir())
        self._prompts = itertools.cycle([self._prompt(text) for text in QUESTIONS])
        self._max_tokens = max_tokens
        self._names = itertools.count()
        self._flying: set[str] = set()

    def serve(self, stage: Stage, seconds: float, served: Callable[[float], None] = lambda seconds: None) -> None:
        """Serve the stage's load for so long, and add the time and tokens of all steps with no more requests than it.

        ``served`` is called with the seconds of every step.
        """
        begin = time.monotonic()
        while (now := time.monotonic()) - begin < seconds:
            while len(self._flying) < stage.load:
                name = str(next(self._names))
                self._flying.add(name)
                how = Sampling(max_tokens=self._max_tokens, temperature=0.0, seed=0)
                self.local.engine.add(Submit(request_id=name, prompt=tuple(next(self._prompts)), sampling=how))
            made = self.local.engine.step()
            self._flying -= {one.request_id for one in made if one.finish}
            took = time.monotonic() - now
            if len(self._flying) <= stage.load:
                stage.seconds += took
                stage.tokens += sum(len(one.tokens) for one in made)
            served(took)

    def _prompt(self, text: str) -> list[int]:
        return self.local.tokenizer.chat([{"role": "user", "content": text}])


def measure(
    load: int, settle: float, seconds: float, auto: Server, operator: Operator, fixed: Server
) -> dict[str, Stage]:
    """Return the stages of one load by way: each serves for ``seconds``, Auto ``settle`` seconds longer."""
    stages = {way: Stage(load, shape=way) for way in FIXED}
    own = Stage(load)
    auto.serve(Stage(load), settle, operator.served)
    fixed.serve(Stage(load), SLICE_SECONDS)
    for _ in range(max(1, round(seconds / SLICE_SECONDS))):
        for way, stage in stages.items():
            fixed.local.run_shape(TreeShape.parse(way))
            fixed.serve(stage, SLICE_SECONDS)
        auto.serve(own, SLICE_SECONDS, operator.served)
    own.shape = operator.shape(load, 256)
    own.reasons, operator.reasons = operator.reasons, []
    return {**stages, "Auto": own}


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw time per token of all ways over the stages, and below it the depth that Auto chose."""
    loads = document["loads"]
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(8, 5), sharex=True, height_ratios=(3, 1))
    at = range(len(loads))
    styles = {"none": ("#888888", "--"), "Auto": ("#111111", "-")}
    for way, stages in document["ways"].items():
        color, line = styles.get(way, (None, ":"))
        label = {"none": "no speculation", "Auto": "Auto (specdecode)"}.get(way, f"fixed {way}")
        values = [one["milliseconds_per_token"] for one in stages]
        upper.plot(at, values, line, color=color, marker="o", label=label, linewidth=2 if way == "Auto" else 1.2)
    upper.set_ylabel("ms per token of a request")
    upper.legend(fontsize=8)
    upper.set_title(f"{document['machine']}, {document['threads']} threads, {document['date']}", fontsize=9)
    shapes = [one["shape"] for one in document["ways"]["Auto"]]
    lower.bar(at, [TreeShape.parse(shape).depth for shape in shapes], color="#b8c4d0")
    for index, shape in enumerate(shapes):
        lower.text(index, 0.1, shape, ha="center", va="bottom", fontsize=7)
    lower.set_ylabel("depth of Auto")
    lower.set_xticks(list(at), [str(load) for load in loads])
    lower.set_xlabel("requests in flight, one stage after the other")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def table(document: dict[str, Any]) -> Iterator[str]:
    """Yield time per token by load, first stage of each, and the speed of Auto over the best fixed shape's."""
    loads = list(dict.fromkeys(document["loads"]))
    yield "| ms per token | " + " | ".join(f"{load} requests" for load in loads) + " |"
    yield "|---|" + "---|" * len(loads)
    found = {
        way: [next(one for one in stages if one["load"] == load) for load in loads]
        for way, stages in document["ways"].items()
    }
    for way, stages in found.items():
        names = [f" ({one['shape']})" if way == "Auto" else "" for one in stages]
        cells = [f"{one['milliseconds_per_token']}{name}" for one, name in zip(stages, names, strict=True)]
        yield f"| {way} | " + " | ".join(cells) + " |"
    fixed = [stages for way, stages in found.items() if way != "Auto"]
    ratios = [
        min(one["milliseconds_per_token"] for one in at) / auto["milliseconds_per_token"]
        for auto, *at in zip(found["Auto"], *fixed, strict=True)
    ]
    yield "| Auto over the best | " + " | ".join(f"{ratio:.3f}" for ratio in ratios) + " |"


def main() -> None:
    """Run all ways, and write the figures and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 2, 4, 8, 16, 4, 1], help="requests in flight")
    parser.add_argument("--settle", type=float, default=120.0, help="seconds of Auto at a load before it is measured")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of each way at a load")
    parser.add_argument("--max-tokens", type=int, default=64, help="length of an answer")
    parser.add_argument("--out", type=Path, required=True, metavar="STEM", help="writes STEM.json and STEM.svg")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {**described(), "loads": args.loads, "settle": args.settle, "seconds": args.seconds}
    document["ways"] = {way: [] for way in (*FIXED, "Auto")}
    most = max(args.loads)
    auto, fixed = Server(most, args.max_tokens), Server(most, args.max_tokens)
    operator = Operator(auto.local, most)
    operator.poll(report=False)
    calibrate(auto.local.engine, CALIBRATION_SECONDS)
    for load in args.loads:
        for way, one in measure(load, args.settle, args.seconds, auto, operator, fixed).items():
            print(f"{way:8} {load:3} requests: {one.milliseconds_per_token:6.1f} ms a token, {one.shape}", flush=True)
            document["ways"][way].append(
                {
                    "load": load,
                    "milliseconds_per_token": round(one.milliseconds_per_token, 2),
                    "tokens": one.tokens,
                    "shape": one.shape,
                    "reasons": one.reasons,
                }
            )
        args.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    for server in (auto, fixed):
        server.local.close()
    draw(document, args.out.with_suffix(".svg"))
    print("\n".join(table(document)))


if __name__ == "__main__":
    main()
