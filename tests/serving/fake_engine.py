"""An engine without a model, for the process around it: it says one text to everyone, a few tokens a step.

Imported by name in the spawned process (its folder is on sys.path), so it lives in a module of its own.
"""

from __future__ import annotations

import time

import small_model

from specdecode_worker.contract import DraftState, Plan, PlanState, Report, SyntheticKnobs, TrafficCell, WorkerConfig
from specdecode_worker.engine.messages import Loaded, Submit, Tokens

TEXT = "Grüße an alle: 你好, world! ✨ " * 4
TOKENS_PER_STEP = 3
MAX_MODEL_LEN = 256
END = 257
STEP_SECONDS = 0.002

# Prompts that make the engine misbehave (first token id).
CRASH, SILENT, REFUSED = 7, 8, 9


class FakeEngine:
    """Byte b of TEXT is the token that the byte tokenizer of the tests gives to b."""

    def __init__(self, text_ids: tuple[int, ...]) -> None:
        self._text = text_ids
        self._requests: dict[str, tuple[Submit, int]] = {}
        self._plan = Plan()
        self._knobs: SyntheticKnobs | None = None
        self._finished = self._arrivals = self._drafts = self._accepted = self._output = 0

    @property
    def idle(self) -> bool:
        return not any(submit.prompt[0] != SILENT for submit, _ in self._requests.values())

    def add(self, request: Submit) -> None:
        if request.prompt[0] == CRASH:
            raise RuntimeError("planted: the step failed")
        if request.prompt[0] == REFUSED:
            raise ValueError("planted: not this one")
        self._arrivals += 1
        self._requests[request.request_id] = (request, 0)

    def abort(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def step(self) -> list[Tokens]:
        time.sleep(STEP_SECONDS)
        return [self._advance(key) for key, (submit, _) in list(self._requests.items()) if submit.prompt[0] != SILENT]

    def report(self) -> Report:
        traffic = TrafficCell(
            task="other", arrivals=self._arrivals, finished=self._finished, prompt_tokens=0, cached_tokens=0,
            output_tokens=self._output,
        )  # fmt: skip
        return Report(
            boot_id="boot",
            worker="fake",
            clock_seconds=time.monotonic(),
            model="fake",
            draft=DraftState(method="eagle3", hash="d"),
            plan=PlanState(uid=self._plan.uid, version=self._plan.version),
            synthetic=self._knobs,
            running=len(self._requests),
            drafts=self._drafts,
            draft_tokens=2 * self._drafts,
            accepted_tokens=self._accepted,
            traffic=(traffic,),
        )

    def set_plan(self, plan: Plan) -> None:
        if plan.max_depth == 13:
            raise ValueError("planted: no depth of 13")
        self._plan = plan

    load_draft = None

    def calibration_loads(self) -> tuple[int, ...]:
        return ()

    def run_plainly(self, plainly: bool) -> None:
        pass

    def assume_plain(self, sequences: int, seconds: float) -> None:
        pass

    def forget_traffic(self) -> None:
        pass

    def set_draft(self, name: str, loaded: object) -> list[Tokens]:
        raise AssertionError("nothing loads here")

    def set_synthetic(self, knobs: SyntheticKnobs | None) -> None:
        self._knobs = knobs

    def _advance(self, key: str) -> Tokens:
        submit, at = self._requests[key]
        wanted = [self._text[i] if i < len(self._text) else END for i in range(at, at + TOKENS_PER_STEP)]
        wanted = wanted[: wanted.index(END) + 1] if END in wanted else wanted
        tokens = wanted[: submit.sampling.max_tokens - at]
        at += len(tokens)
        finish = "stop" if tokens[-1] == END else "length" if at == submit.sampling.max_tokens else None
        self._drafts += 1
        self._accepted += 2
        self._output += len(tokens)
        steps = -(-at // TOKENS_PER_STEP)
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
        )


def build(config: WorkerConfig) -> tuple[FakeEngine, Loaded]:
    """Stands in for the factory."""
    if config.model.dtype == "float32":
        raise RuntimeError("planted: the weights do not load")
    loaded = Loaded(max_model_len=MAX_MODEL_LEN, target="t", draft_hash="d", eos_token_ids=(END,))
    return FakeEngine(tuple(small_model.byte_tokenizer().encode(TEXT).ids)), loaded
