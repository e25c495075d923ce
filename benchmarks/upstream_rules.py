"""Compares the simulator's rules of vLLM and SGLang with the files of their wheels, on 1,000 random inputs each.

    pip download --no-deps vllm==0.33.0 sglang==0.5.23    # unzip both into one folder
    python benchmarks/upstream_rules.py FOLDER

Nothing of the wheels is installed: the two files are read beside stand-ins for what they import.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl

from specdecode_simulator.policies.upstream_rules import (
    SGLANG_DEFAULT,
    AcceptanceEstimator,
    StepCandidates,
    StepSlot,
    admitted_drafts,
    draft_budget,
    slot_of,
)

CASES = 1000
DEPTH = 5


def main() -> None:
    """Compare, and print how many inputs were equal."""
    folder = Path(sys.argv[1])
    generator = np.random.default_rng(0)
    sglang = loaded(folder / "sglang/srt/speculative/adaptive_spec_params.py")
    adaptive = loaded(folder / "vllm/v1/worker/gpu/spec_decode/adaptive_verification.py")
    estimator = loaded(folder / "vllm/v1/worker/gpu/spec_decode/acceptance_estimator.py")
    print("SGLang, steps by batch size:", sum(same_steps(sglang, generator) for _ in range(CASES)), "of", CASES)
    print("vLLM, draft budget:", sum(same_budget(adaptive, generator) for _ in range(CASES)), "of", CASES)
    print("vLLM, admitted drafts:", sum(same_admitted(adaptive, generator) for _ in range(CASES)), "of", CASES)
    print("vLLM, refits:", sum(same_refit(estimator, generator) for _ in range(CASES)), "of", CASES)


def loaded(path: Path) -> Any:
    """Run a file with stand-ins for its imports."""
    stand_ins = {name: MagicMock() for name in IMPORTS}
    stand_ins["vllm.triton_utils"] = SimpleNamespace(tl=tl, triton=triton)
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)  # type: ignore[arg-type]
    try:
        module = ModuleType(path.stem)
        module.__file__ = str(path)
        compiled, torch.compile = torch.compile, lambda function, **_: function  # type: ignore[assignment]
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
        torch.compile = compiled  # type: ignore[assignment]
        return module
    finally:
        for name, known in before.items():
            if known is None:
                del sys.modules[name]


IMPORTS = (
    *("sglang", "sglang.srt", "sglang.srt.arg_groups", "sglang.srt.arg_groups.overrides", "sglang.srt.runtime_context"),
    *("sglang.srt.speculative", "sglang.srt.speculative.spec_info", "sglang.srt.utils"),
    *("vllm", "vllm.envs", "vllm.config", "vllm.config.compilation", "vllm.distributed"),
    *("vllm.distributed.parallel_state", "vllm.logger", "vllm.utils", "vllm.utils.gpu_sync_debug"),
    *("vllm.utils.torch_utils", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend", "vllm.v1.utils"),
    *("vllm.v1.worker", "vllm.v1.worker.gpu", "vllm.v1.worker.gpu.async_utils", "vllm.v1.worker.gpu.attn_utils"),
    *("vllm.v1.worker.gpu.spec_decode", "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"),
    "vllm.triton_utils",
)


def same_steps(upstream: Any, generator: Any) -> bool:
    """Compare 60 batches of random sizes and acceptance, with SGLang's table or with a random one."""
    table = dict(SGLANG_DEFAULT) if generator.random() < 0.5 else random_table(generator)
    initial = int(generator.integers(8))
    entries = {
        str(size): {
            "candidate_steps": list(one.steps),
            "up_hysteresis": one.up,
            "down_hysteresis": one.down,
            "ceiling_coeff": one.ceiling,
        }
        for size, one in table.items()
    }
    upstream.DEFAULT_ADAPTIVE_CONFIG = entries
    theirs = upstream.AdaptiveSpeculativeParams(initial)
    ours = {size: StepSlot(one, initial) for size, one in table.items()}
    level = generator.uniform(0, 7)
    for _ in range(60):
        sequences = int(generator.integers(1, 80))
        steps = theirs.get_steps_for_batch(sequences)
        slot = ours[slot_of(sorted(ours), sequences)]
        if slot.steps != steps:
            return False
        accepted = np.minimum(generator.poisson(level, sequences), steps).tolist()
        theirs.on_verify_complete(accepted, sequences)
        slot.update(sum(accepted) / len(accepted))
    return True


def random_table(generator: Any) -> dict[int, StepCandidates]:
    sizes = sorted(set(generator.integers(1, 64, 3).tolist()))
    return {
        size: StepCandidates(
            tuple(sorted(set(generator.integers(0, 8, 4).tolist()))),
            up=float(generator.uniform(-0.3, 0.3)),
            down=float(generator.uniform(-0.3, 0.3)),
            ceiling=float(generator.choice([0.0, 1.5])),
        )
        for size in sizes
    }


def same_budget(upstream: Any, generator: Any) -> bool:
    count = int(generator.integers(1, 33))
    confidences = generator.uniform(0, 1, (count, DEPTH)).astype(np.float32)
    drafts = generator.integers(0, DEPTH + 1, count)
    verify = np.maximum.accumulate(generator.uniform(1, 2, 400)) + np.arange(400) * generator.uniform(0, 0.05)
    draft = generator.uniform(0, 1, 40)
    most = int(generator.integers(0, count * DEPTH + 1))
    names = [str(index) for index in range(count)]
    manager = object.__new__(upstream.AdaptiveVerificationManager)
    manager.cost_tables, manager.num_speculative_steps = (draft, verify), DEPTH
    manager.num_bonus_tokens, manager._max_total_logits = 1, count + most
    manager._stale_confidences, manager._stale_idx = [SimpleNamespace(np=confidences)], 0
    manager.req_states = SimpleNamespace(
        req_id_to_index={name: index for index, name in enumerate(names)},
        num_computed_tokens_np=np.full(count, 10),
        prefill_len=SimpleNamespace(np=np.full(count, 5)),
    )
    scheduled = {name: 1 + int(own) for name, own in zip(names, drafts, strict=True)}
    tokens = manager.get_num_tokens(scheduled, {name: [0] * int(own) for name, own in zip(names, drafts, strict=True)})
    survival = np.cumprod(confidences.astype(np.float64), axis=1)[np.arange(DEPTH) < drafts[:, None]]
    most = min(most, int(drafts.sum()))
    return tokens == count + draft_budget(survival, count, count, draft[count], verify, most)


def same_admitted(upstream: Any, generator: Any) -> bool:
    count = int(generator.integers(1, 33))
    confidences = generator.uniform(0, 1, (count, DEPTH)).astype(np.float32)
    drafts = generator.integers(0, DEPTH + 1, count)
    budget = int(generator.integers(0, drafts.sum() + 1))
    capacities = torch.tensor(drafts, dtype=torch.int32)
    if budget < drafts.sum():
        upstream._assign_draft_token_budget(torch.tensor(confidences), torch.arange(count), capacities, budget, DEPTH)
    found = admitted_drafts(confidences, drafts, budget)
    return bool(found.tolist() == capacities.tolist())


def same_refit(upstream: Any, generator: Any) -> bool:
    """Compare slope and intercepts after two rounds of three steps, to a thousandth (theirs are float32)."""
    count = int(generator.integers(1, 17))
    theirs = upstream.OnlineAcceptanceEstimator(count, DEPTH, torch.device("cpu"))
    theirs.REFIT_INTERVAL = 3
    ours = AcceptanceEstimator(DEPTH)
    for _ in range(2):
        for _ in range(3):
            features = generator.normal(0.5, 2, (count, DEPTH)).astype(np.float32)
            predictions = ours.predict(features)
            admitted = generator.integers(0, DEPTH + 1, count)
            accepted = np.minimum(generator.integers(0, DEPTH + 1, count), admitted)
            theirs.features, theirs.predictions = torch.tensor(features), torch.tensor(predictions, dtype=torch.float32)
            sampled, rejected = torch.tensor(accepted + 1), torch.tensor(admitted - accepted)
            ours.add(features, predictions, accepted, admitted)
            theirs.step(torch.arange(count), sampled, rejected)
        ours.refit()
    slope = abs(ours.slope - theirs.slope.item()) < 1e-3
    return bool(slope and np.allclose(ours.intercepts, theirs.intercepts.numpy(), atol=1e-3))


if __name__ == "__main__":
    main()
