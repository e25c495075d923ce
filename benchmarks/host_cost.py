"""Host milliseconds of a decode step on a stand-in device: `host_cost.py [--against CHECKOUT] [--profile CASE]`.

The engine runs its own host code: scheduling, choice of shapes, tables of the graph, reading and recording. The graph
itself does nothing, so every step emits all tokens of its trees. The figure is the CPU time of the engine's thread, so
that other processes on the machine do not count. Copies to a GPU are copies between two buffers of the host here.

One row is no step: the allocation of the blocks of a chunk of CHUNK_TOKENS from a pool of POOL_BLOCKS whose blocks are
all owned or cached, which is the state of every server with prefix caching after its first minutes.

With ``--against``, another checkout measures itself with its own copy of this command, in turn with this one, round by
round.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CASES = {"plain, 16 rows": ("none", 16), "chain:5, 16 rows": ("chain:5", 16),
         "plain, 64 rows": ("none", 64), "chain:5, 64 rows": ("chain:5", 64)}  # fmt: skip
PROMPT_TOKENS, WARM_STEPS, STEPS, ROUNDS = 256, 20, 200, 5
MAX_LENGTH = 2048
ALLOCATION = "blocks of a chunk, warm cache"
POOL_BLOCKS, CHUNK_TOKENS, OWNERS, TURNOVERS, ALLOCATIONS = 25_000, 2048, 64, 5, 200
SHAPE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3,
                         "num_attention_heads": 1, "num_key_value_heads": 1,
                         "max_position_embeddings": MAX_LENGTH}  # fmt: skip


@dataclass(frozen=True)
class NoDevice:
    """Capture backend whose graphs do nothing. Their output says that every node of a chain was accepted."""

    def capture(self, work: Any) -> Any:
        import torch

        from specdecode_worker.engine.cuda_graphs import Captured

        step = work.__self__
        depth = step.key.passes
        step.out[:, depth + 1 : 2 * depth + 1] = torch.arange(1, depth + 1)  # the path; tokens and ranks are 0
        step.out[:, -1] = depth
        if not depth:
            step.out[:, 1] = -1  # nothing was ranked
        return Captured(lambda: None)

    def clear(self) -> None:
        """Do nothing."""


def engine_of(rows: int) -> Any:
    """Return an engine of ``rows`` sequences over tiny networks, whose steps are launched ahead as on a GPU."""
    import torch

    from specdecode_worker.contract import DraftState
    from specdecode_worker.control.plan import Dispatcher
    from specdecode_worker.core.device_state import DeviceState
    from specdecode_worker.core.kv_cache import BLOCK_SIZE, BlockPool
    from specdecode_worker.drafts.eagle import EagleDrafter
    from specdecode_worker.drafts.registry import (  # type: ignore[attr-defined]  # as older versions have it
        DraftRegistry,
        LoadedDraft,
        paged_cache,
    )
    from specdecode_worker.engine.cuda_graphs import StepGraphs
    from specdecode_worker.engine.engine import Engine, EngineParts, ShapeSelector
    from specdecode_worker.engine.scheduler import Limits, Scheduler
    from specdecode_worker.engine.stats import WorkerIdentity
    from specdecode_worker.engine.target import Target
    from specdecode_worker.models.arch import causal_lm_config
    from specdecode_worker.models.causal_lm import CausalLM
    from specdecode_worker.models.config import eagle3_config
    from specdecode_worker.models.eagle import Eagle3Head

    cpu, blocks = torch.device("cpu"), rows * (MAX_LENGTH // BLOCK_SIZE + 2) + 1
    target = CausalLM(causal_lm_config(SHAPE)).requires_grad_(False)
    head_shape = {**SHAPE, "num_hidden_layers": 1, "draft_vocab_size": SHAPE["vocab_size"],
                  "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}  # fmt: skip
    head = Eagle3Head(eagle3_config(head_shape, target.config), target.model.embed_tokens).requires_grad_(False)
    state = DeviceState(rows, MAX_LENGTH, torch.float32, cpu)
    cache = paged_cache(target.config, SHAPE["num_hidden_layers"], blocks, torch.float32, cpu)
    own = paged_cache(target.config, 1, blocks, torch.float32, cpu)
    drafter = EagleDrafter(head, None, own, state, MAX_LENGTH)
    loaded = LoadedDraft(drafter, DraftState(method="eagle3", hash="d"))
    registry = DraftRegistry({"": loaded}, state, target.config.hidden_size)
    passes, budget = Target(target, cache, state), 2048
    graphs = StepGraphs(passes, registry, state, NoDevice(), rows=(rows,), max_tokens=budget, capture_after_steps=1)
    parts = EngineParts(
        scheduler=Scheduler(Limits(rows, budget), BlockPool(blocks), prefix_caching=True),
        target=passes,
        drafts=registry,
        state=state,
        shape_selector=ShapeSelector(Dispatcher("", "d"), registry),
        graphs=graphs,
    )
    identity = WorkerIdentity(boot_id="b", worker="w", model="m", target="t", max_num_seqs=rows)
    return Engine(parts, identity, max_model_len=MAX_LENGTH, eos_token_ids=(), pipelined=True)


def running(shape: str, rows: int) -> Any:
    """Return an engine that decodes ``rows`` requests, half of them sampled, past its first steps."""
    from specdecode_worker.contract import Plan, TreeShape
    from specdecode_worker.core.messages import Submit
    from specdecode_worker.sampling.params import Sampling

    engine = engine_of(rows)
    engine.set_plan(Plan(draft="d", version=1, initial=TreeShape.parse(shape), explore=0, guard=True))
    for i in range(rows):
        sampling = Sampling(
            max_tokens=MAX_LENGTH - PROMPT_TOKENS - 1, seed=i, temperature=float(i % 2), ignore_eos=True
        )
        engine.add(Submit(request_id=str(i), prompt=tuple((i * 7 + k) % 61 for k in range(PROMPT_TOKENS)),
                          sampling=sampling, task="t"))  # fmt: skip
    while engine._graphs.replayed < WARM_STEPS:
        engine.step()
    return engine


def measure(shape: str, rows: int) -> float:
    """Return the milliseconds of CPU time of a step: the tenth percentile, which other processes disturb least."""
    engine, times = running(shape, rows), []
    before = engine._graphs.replayed
    for _ in range(STEPS):
        begin = time.thread_time()
        engine.step()
        times.append(time.thread_time() - begin)
    assert engine._graphs.replayed - before > 0.75 * STEPS, "steps must be graphs"
    return 1e3 * statistics.quantiles(times, n=10)[0]


def measure_allocation() -> float:
    """Return the median milliseconds of CPU time to allocate the blocks of a chunk from a warm pool.

    Sequences begin with a chunk, grow block by block in turn, register all blocks and end in random order, until all
    blocks were taken TURNOVERS times. The cached blocks that are evicted for a chunk are then scattered over the pool.
    """
    from specdecode_worker.core.kv_cache import BLOCK_SIZE, BlockPool

    pool, random, digests = BlockPool(POOL_BLOCKS), Random(0), count()
    chunk, sequences, parents = CHUNK_TOKENS // BLOCK_SIZE, list[list[int]](), list[bytes]()

    def grow(index: int, blocks: int) -> float:
        mine = sequences[index]
        began = time.thread_time()
        taken = pool.allocate(blocks, after=mine[-1] if mine else None, room=blocks)
        seconds = time.thread_time() - began
        assert taken is not None, "few blocks are owned"
        for block in taken:
            digest = next(digests).to_bytes(8)
            pool.register(block, digest, parents[index])
            parents[index] = digest
        mine += taken
        return seconds

    times, total = [], 0
    while total < TURNOVERS * POOL_BLOCKS:
        if len(sequences) == OWNERS:
            ended = random.randrange(OWNERS)
            pool.release(sequences.pop(ended))
            parents.pop(ended)
        sequences.append([])
        parents.append(b"")
        times.append(grow(-1, chunk))
        for _ in range(random.randint(0, 4)):
            for index in range(len(sequences)):
                grow(index, 1)
        total = next(digests)
    assert pool.free < chunk, "the pool is warm"
    return 1e3 * statistics.median(times[-ALLOCATIONS:])


def profile(name: str) -> None:
    """Print where the time of a step goes."""
    engine = running(*CASES[name])
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(STEPS):
        engine.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def in_process(checkout: Path) -> dict[str, float]:
    """Measure all cases with the code of a checkout, in a process of its own."""
    path = os.pathsep.join(str(checkout / part) for part in ("worker", "kernels"))
    command = [sys.executable, str(checkout / "benchmarks" / "host_cost.py"), "--once"]
    ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(ran.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="checkout to compare with")
    parser.add_argument("--profile", choices=CASES, help="print a profile of one case")
    parser.add_argument("--once", action="store_true", help="measure once with the code on PYTHONPATH")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    if args.profile:
        profile(args.profile)
        return
    if args.once:
        figures = {name: measure(*case) for name, case in CASES.items()}
        print(json.dumps({**figures, ALLOCATION: measure_allocation()}))
        return
    checkouts = {"now": ROOT, **({"before": args.against.resolve()} if args.against else {})}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for index in range(args.rounds):
        for name in sorted(checkouts, reverse=bool(index % 2)):
            rounds[name].append(in_process(checkouts[name]))
    table = {
        case: {
            name: round(statistics.median(one[case] for one in measured), 3)
            for name, measured in rounds.items()
            if case in measured[0]
        }
        for case in (*CASES, ALLOCATION)
    }
    unit = "milliseconds of CPU time of a step, tenth percentile, or of an allocation, median; median of the rounds"
    print(json.dumps({"unit": unit, "rounds": args.rounds, "cases": table}, indent=1))


if __name__ == "__main__":
    main()
