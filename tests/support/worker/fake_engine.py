"""Fake engine without a model, for tests of the process around it: answers a fixed text, a few tokens per step.

For a prompt that contains "SAY:" it answers the rest of the prompt, up to a special token. Log-probabilities are made
up but known: they depend on the token and the seed of the request.

The spawned process imports this module by name (its folder is on sys.path), so it is a module of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from specdecode_worker.contract import (
    DraftConfig,
    DraftState,
    Plan,
    PlanState,
    Report,
    SyntheticKnobs,
    TrafficCell,
    TreeShape,
    TrialState,
    WorkerConfig,
)
from specdecode_worker.core.messages import Loaded, Logprobs, Submit, Tokens
from specdecode_worker.drafts.draft_files import draft_hash
from specdecode_worker.drafts.swap import BlockCosts, SwapStatus
from specdecode_worker.models.errors import ModelError
from specdecode_worker.models.fetch import resolve
from support import small_model

TEXT = "Grüße an alle: 你好, world! ✨ " * 4
TOKENS_PER_STEP = 3
MAX_MODEL_LEN = int(os.environ.get("FAKE_MAX_MODEL_LEN", "512"))
END = 257
STEP_SECONDS = 0.002
LOAD_SECONDS = 0.3

# First token ids of prompts that make the engine misbehave.
CRASH, SILENT, REFUSED = 7, 8, 9
HANG, STICKY_STEP, UNREADABLE, SLOW = 10, 11, 12, 13
# Prompt that is answered with special tokens only, many in each step.
FLOOD, FLOOD_TOKEN, FLOOD_TOKENS_PER_STEP = (20, 20, 20), 256, 100
SAY = tuple(small_model.byte_tokenizer().encode("SAY:").ids)
SLOW_SECONDS = 3.0
"""Time of a step with a SLOW request."""
STICKY_ERROR = "CUDA error: an illegal memory access was encountered (planted)"
STICKY_DEPTH = 14
"""Maximum depth of a plan that makes the device fail."""
SLOW_DRAFT = "/slow"
"""Draft whose swap between two steps takes SLOW_SECONDS."""
STICKY_DRAFT = "/sticky"
"""Draft that makes the device fail while it is loaded."""


def write_draft(folder: Path, name: str) -> str:
    """Write the files that a hash is computed of, and return their URI.

    The fake engine reads no more. It behaves by the folder's name.
    """
    (folder / name).mkdir()
    (folder / name / "config.json").write_text("{}")
    (folder / name / "model.safetensors").write_bytes(name.encode())
    return f"file://{folder / name}"


class FakeEngine:
    """Engine that emits the bytes of TEXT as tokens of the tests' byte tokenizer."""

    max_model_len = MAX_MODEL_LEN
    on_launch: Callable[[int, int], None] | None = None

    def __init__(self, text_ids: tuple[int, ...]) -> None:
        self._text = text_ids
        self._requests: dict[str, tuple[Submit, int]] = {}
        self._plan = Plan()
        self._knobs: SyntheticKnobs | None = None
        self._drafts_by_name = {"": DraftState(method="eagle3", hash="d")}
        self._finished = self._arrivals = self._drafts = self._accepted = self._output = 0

    @property
    def idle(self) -> bool:
        return not any(submit.prompt[0] != SILENT for submit, _ in self._requests.values())

    def add(self, request: Submit) -> None:
        if request.prompt[0] == CRASH:
            raise RuntimeError("planted: the step failed")
        if request.prompt[0] == REFUSED:
            raise ValueError("planted: not this one")
        self._arrivals += request.emitted is None
        self._requests[request.request_id] = (request, len(request.emitted or ()))

    def abort(self, request_id: str, *, stopped: bool = False) -> None:
        self._finished += self._requests.pop(request_id, None) is not None and stopped

    def step(self) -> list[Tokens]:
        time.sleep(STEP_SECONDS)
        first_tokens = {submit.prompt[0] for submit, _ in self._requests.values()}
        if HANG in first_tokens:
            hang_in_python()
        if STICKY_STEP in first_tokens:
            raise_sticky_error()
        if SLOW in first_tokens:
            time.sleep(SLOW_SECONDS)
        if UNREADABLE in first_tokens:
            return ["no message of the engine"]  # type: ignore[list-item]
        return [self._advance(key) for key, (submit, _) in list(self._requests.items()) if submit.prompt[0] != SILENT]

    def open_exchange(self, address: tuple[str, int] | None, wake: Callable[[], None]) -> int:
        return 0

    def close(self) -> None:
        pass

    @property
    def draft_names(self) -> list[str]:
        return list(self._drafts_by_name)

    @property
    def draft(self) -> DraftState:
        return self._drafts_by_name[""]

    def loaded_draft(self) -> Any:
        return SimpleNamespace(state=self.draft)

    def set_block(self, block: BlockCosts | None) -> None:
        pass

    def report(self, swaps: Mapping[str, SwapStatus] | None = None, trial: TrialState | None = None) -> Report:
        states = dict(self._drafts_by_name)
        for name, swap in (swaps or {}).items():
            shown = {"name": name, "pending": swap.pending, "swap_problem": swap.problem}
            states[name] = states.get(name, DraftState()).model_copy(update=shown)
        traffic = TrafficCell(
            task="other", arrivals=self._arrivals, finished=self._finished, prompt_tokens=0, cached_tokens=0,
            output_tokens=self._output,
        )  # fmt: skip
        return Report(
            boot_id="boot",
            worker="fake",
            clock_seconds=time.monotonic(),
            model="fake",
            draft=states.pop(""),
            trial=trial,
            named_drafts=tuple(states.values()),
            plan=PlanState(uid=self._plan.uid, version=self._plan.version),
            synthetic=self._knobs,
            running=len(self._requests),
            drafts=self._drafts,
            draft_tokens=2 * self._drafts,
            accepted_tokens=self._accepted,
            traffic=(traffic,),
        )

    def set_plan(self, plan: Plan) -> None:
        if plan.max_depth == STICKY_DEPTH:
            raise_sticky_error()
        if plan.max_depth == 13:
            raise ValueError("planted: no depth of 13")
        self._plan = plan

    def calibration_loads(self) -> tuple[int, ...]:
        return ()

    def calibration_shapes(self) -> tuple[TreeShape, ...]:
        return ()

    def force_shape(self, shape: TreeShape | None) -> None:
        pass

    def reset_step_costs(self) -> None:
        pass

    def set_plain_step_time(self, sequences: int, seconds: float) -> None:
        pass

    def reset_traffic(self) -> None:
        pass

    def set_synthetic(self, knobs: SyntheticKnobs | None) -> None:
        self._knobs = knobs

    def load_draft(self, config: DraftConfig, name: str = "") -> Any:
        time.sleep(LOAD_SECONDS)
        uri = config.uri or ""
        if uri.endswith(STICKY_DRAFT):
            raise_sticky_error()
        if uri.endswith("/misfit"):
            raise ModelError("planted: fc.weight is [8, 24], the target needs [8, 96]")
        if uri.endswith("/panic"):
            raise ZeroDivisionError("planted: a bug of a loader")
        state = DraftState(name=name, method=config.method, hash=draft_hash(config, resolve), uri=uri)
        return SimpleNamespace(state=state.model_copy(update={"quantization": config.quantization}))

    def set_draft(self, name: str, loaded: Any) -> list[Tokens]:
        if loaded.state.uri.endswith(SLOW_DRAFT):
            time.sleep(SLOW_SECONDS)
        if loaded.state.uri.endswith("/too-large"):
            raise ModelError("planted: too little memory for the states")
        self._drafts_by_name[name] = loaded.state
        return []

    def _advance(self, key: str) -> Tokens:
        submit, at = self._requests[key]
        text = _requested_text(submit.prompt) or self._text
        wanted = [text[i] if i < len(text) else END for i in range(at, at + TOKENS_PER_STEP)]
        if submit.prompt == FLOOD:
            wanted = [FLOOD_TOKEN] * FLOOD_TOKENS_PER_STEP
        wanted = wanted[: wanted.index(END) + 1] if END in wanted else wanted
        tokens = wanted[: submit.sampling.max_tokens - at]
        at += len(tokens)
        finish = "stop" if tokens[-1] == END else "length" if at == submit.sampling.max_tokens else None
        self._drafts += 1
        self._accepted += 2
        self._output += len(tokens)
        steps = -(-(at - len(submit.emitted or ())) // TOKENS_PER_STEP)
        self._requests[key] = (submit, at)
        if finish:
            self._finished += 1
            del self._requests[key]
        return Tokens(
            request_id=key,
            tokens=tuple(tokens),
            finish=finish,
            drafts=steps,
            draft_tokens=2 * steps,
            accepted=2 * steps,
            logprobs=_logprobs(tokens, submit.sampling.logprobs, submit.sampling.seed),
            prompt_logprobs=_logprobs(submit.prompt[1:], submit.sampling.prompt_logprobs, 0) if at <= 3 else (),
        )


def hang_in_python() -> None:
    while True:
        time.sleep(1)


def raise_sticky_error() -> None:
    """Raise the error of a broken device, in a process whose regular exit would wait for a thread without end."""
    threading.Thread(target=hang_in_python, name="planted").start()
    raise RuntimeError(STICKY_ERROR)


def hang_in_hook(record: object) -> object:
    """Redaction hook that never returns."""
    hang_in_python()
    return record


def logprob(token: int, seed: int = 0) -> float:
    """Return the log-probability that the engine reports for a token."""
    return -(token + 1) / 1024 - seed % 997


def _logprobs(tokens: Sequence[int], count: int | None, seed: int) -> tuple[Logprobs, ...]:
    """Return logprobs for the tokens, with the first tokens of the vocabulary as the most likely alternatives."""
    if count is None:
        return ()
    top = tuple(range(count))
    return tuple(
        Logprobs(token, logprob(token, seed), token + 1, top, tuple(logprob(one, seed) for one in top))
        for token in tokens
    )


def _requested_text(prompt: tuple[int, ...]) -> tuple[int, ...]:
    position = next((i for i in range(len(prompt)) if prompt[i : i + len(SAY)] == SAY), None)
    if position is None:
        return ()
    text = prompt[position + len(SAY) :]
    end = next((i for i, token in enumerate(text) if token >= small_model.VOCAB_SIZE - 2), len(text))
    return text[:end]


def build(config: WorkerConfig) -> tuple[FakeEngine, Loaded]:
    """Build the fake engine in place of the factory."""
    if config.model.dtype == "float32":
        raise RuntimeError("planted: the weights do not load")
    loaded = Loaded(max_model_len=MAX_MODEL_LEN, target="t", draft_hash="d", eos_token_ids=(END,))
    return FakeEngine(tuple(small_model.byte_tokenizer().encode(TEXT).ids)), loaded
