"""Engine in the process of a command that needs no server, with its tokenizer."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdecode_worker.commands.flags import draft_config, model_config, named
from specdecode_worker.contract import (
    OTHER_TASK,
    EngineConfig,
    MergedDraft,
    Plan,
    TaskMatch,
    TreeShape,
    WorkerConfig,
)
from specdecode_worker.core.messages import Submit, Tokens
from specdecode_worker.engine.engine import Engine
from specdecode_worker.engine.factory import load_engine
from specdecode_worker.models.fetch import default_cache_dir, resolve
from specdecode_worker.sampling.params import Sampling
from specdecode_worker.server.tools import Tokenizer
from specdecode_worker.training.prompts import PromptLine, read_prompts

DEFAULT_SHAPE = TreeShape.chain(3)


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Tokenized prompt of one line of a prompts file, and its domain."""

    tokens: tuple[int, ...]
    domain: str = "other"


@dataclass(slots=True)
class Answer:
    """Answer to one prompt, with the sums of its speculation statistics."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    drafts: int = 0
    accepted: int = 0

    def take(self, new: Tokens) -> None:
        """Append new tokens and update the statistics."""
        self.tokens += new.tokens
        self.finish = new.finish or ""
        self.drafts, self.accepted = new.drafts, new.accepted


@dataclass(frozen=True, slots=True)
class RunTiming:
    """Duration of a run of requests, with its tokens and steps.

    It starts at the first tokens of the answers, because prefill is not compared.
    """

    seconds: float
    tokens: int
    steps: int

    @classmethod
    def total(cls, runs: Sequence[RunTiming]) -> RunTiming:
        """Return the sums over several runs."""
        return cls(*(sum(getattr(run, name) for run in runs) for name in ("seconds", "tokens", "steps")))

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second, over all requests."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def step_milliseconds(self) -> float:
        """Mean duration of a step in milliseconds."""
        return 1000 * self.seconds / self.steps if self.steps else 0.0


class LocalEngine:
    """Engine with its tokenizer and a plan that is set by the caller."""

    def __init__(self, config: WorkerConfig, cache_dir: Path) -> None:
        self.engine: Engine = load_engine(config, lambda uri: resolve(uri, cache_dir))
        self.folder = resolve(config.model.target, cache_dir)
        self.tokenizer = Tokenizer.from_folder(self.folder)
        self.target_format = self.engine.target_form or config.model.dtype
        self._plans = self._runs = 0

    def close(self) -> None:
        """End the other ranks of a replica on several devices, and free the memory of this one. It does not run again.

        What torch keeps of it would count as used when another engine is loaded.
        """
        self.engine.close()
        del self.engine
        gc.collect()
        torch.cuda.empty_cache()

    def run_shape(self, shape: TreeShape, draft: str = "", merge: tuple[MergedDraft, ...] = ()) -> None:
        """Run ``shape`` with the named draft in all further steps, without guard and exploration.

        ``merge`` names the drafts that are merged with it.
        """
        self._plans += 1
        first = self.engine.draft.hash
        tasks = (TaskMatch(name=OTHER_TASK, draft=draft or None, merge=merge),) if draft or merge else ()
        plan = Plan(draft=first, version=self._plans, initial=shape, tasks=tasks, explore=0, guard=False)
        self.engine.set_plan(plan)

    def prompt(self, line: PromptLine | dict[str, Any]) -> TokenizedPrompt:
        """Tokenize one line of a file of prompts. Raise ValueError if it is invalid."""
        line = PromptLine.model_validate(line)
        if line.prompt is not None:
            tokens = self.tokenizer.encode(line.prompt)
        else:
            tokens = self.tokenizer.chat([message.model_dump() for message in line.messages])
        return TokenizedPrompt(tuple(tokens), line.domain)

    def prompts(self, path: Path) -> list[TokenizedPrompt]:
        """Read and tokenize a file of prompts. Raise PromptFileError if it has none, or an invalid line."""
        return [self.prompt(line) for line in read_prompts(path)]

    def answer(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling: Sequence[Sampling],
        on_tokens: Callable[[int, Tokens], None] = lambda index, new: None,
        *,
        isolated: bool = False,
        together: int = sys.maxsize,
    ) -> tuple[list[Answer], RunTiming]:
        """Answer the prompts, ``together`` at a time, and return the answers and the timing.

        The timing of a group starts at the step in which its last prompt has its first token. An incomplete last group
        is not timed, unless it is the only one. ``on_tokens`` is called with the index of the prompt for all new
        tokens. An ``isolated`` run uses no cached prefix and no answer of an earlier run.
        """
        self._runs += 1
        salt = f"run-{self._runs}" if isolated else ""
        requests = [
            Submit(request_id=str(index), prompt=prompt.tokens, sampling=how, cache_salt=salt)
            for index, (prompt, how) in enumerate(zip(prompts, sampling, strict=True))
        ]
        answers: list[Answer] = []
        timings = []
        for start in range(0, len(requests), together):
            group = requests[start : start + together]
            answers += [Answer() for _ in group]
            timing = self._run(group, answers, on_tokens)
            if start == 0 or len(group) == together:
                timings.append(timing)
        return answers, RunTiming.total(timings)

    def _run(
        self, requests: Sequence[Submit], answers: Sequence[Answer], on_tokens: Callable[[int, Tokens], None]
    ) -> RunTiming:
        """Run a group of requests, whose answers are the last ones so far, and return its timing."""
        for request in requests:
            self.engine.add(request)
        began: float | None = None
        tokens = steps = 0
        while not self.engine.idle:
            for new in self.engine.step():
                answers[int(new.request_id)].take(new)
                tokens += len(new.tokens)
                on_tokens(int(new.request_id), new)
            steps += 1
            if began is None and all(answer.tokens or answer.finish for answer in answers):
                began, tokens, steps = time.monotonic(), 0, 0
        now = time.monotonic()
        return RunTiming(now - (began or now), tokens, steps)


def local_engine(args: argparse.Namespace, *, max_num_seqs: int) -> LocalEngine:
    """Load the engine described by the flags of ``add_model_flags``.

    Raises:
        ValueError: The flags contradict each other.
        ModelError: A model cannot be fetched or loaded.
    """
    config = WorkerConfig(
        model=model_config(args, args.model),
        draft=draft_config(args),
        engine=EngineConfig(max_num_seqs=max_num_seqs, **named(args, EngineConfig)),
    )
    return LocalEngine(config, Path(args.cache_dir) if args.cache_dir else default_cache_dir())


def sampling_of(args: argparse.Namespace, index: int) -> Sampling:
    """Return the sampling parameters given by the flags of ``add_sampling_flags``, with a seed for each prompt."""
    return Sampling(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=(args.seed or 0) + index,
    )


def distinct_4grams(answers: Sequence[Sequence[int]]) -> float:
    """Return the share of 4-grams that are distinct within their answer.

    Repetitive text has a low share and overstates acceptance.
    """
    seen = total = 0
    for tokens in answers:
        grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
        seen, total = seen + len(set(grams)), total + len(grams)
    return seen / total if total else 1.0
