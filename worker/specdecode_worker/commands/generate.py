"""Command ``generate``: generate text for prompts with an engine in this process, without a server."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from specdecode_worker.commands.local_engine import (
    DEFAULT_SHAPE,
    Answer,
    LocalEngine,
    RunTiming,
    TokenizedPrompt,
    distinct_4grams,
    local_engine,
    sampling_of,
)
from specdecode_worker.core.messages import Tokens
from specdecode_worker.embedded.errors import EmbeddedModelError
from specdecode_worker.models.errors import ModelError


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 0 on success, 1 on an error, 2 for wrong usage."""
    if (args.prompt is None) == (args.prompts is None):
        print("generate needs either --prompt TEXT or --prompts FILE.jsonl", file=sys.stderr)
        return 2
    try:
        engine = local_engine(args, max_num_seqs=args.concurrency if args.prompts else 1, sampler=args.sampler)
        engine.run_shape(args.shape if args.shape is not None else DEFAULT_SHAPE)
        prompts = engine.prompts(Path(args.prompts)) if args.prompts else [_one(engine, args)]
        return (
            _stream(engine, prompts[0], args)
            if args.prompt is not None and not args.json
            else _all(engine, prompts, args)
        )
    except (ModelError, EmbeddedModelError, ValueError, OSError) as error:
        print(f"specdecode-worker generate: {error}", file=sys.stderr)
        return 1


def _one(engine: LocalEngine, args: argparse.Namespace) -> TokenizedPrompt:
    """Return the prompt given by --prompt."""
    line = {"prompt": args.prompt} if args.raw else {"messages": [{"role": "user", "content": args.prompt}]}
    return engine.prompt(line)


def _stream(engine: LocalEngine, prompt: TokenizedPrompt, args: argparse.Namespace) -> int:
    """Print the answer to one prompt while it is generated."""
    detokenizer = engine.tokenizer.detokenizer(prompt.tokens)

    def show(_: int, new: Tokens) -> None:
        print("".join(map(detokenizer.push, new.tokens)), end="", flush=True)

    answers, timing = engine.answer([prompt], [sampling_of(args, 0)], show)
    print(detokenizer.flush())
    print(_statistics(answers, timing), file=sys.stderr)
    return 0


def _all(engine: LocalEngine, prompts: list[TokenizedPrompt], args: argparse.Namespace) -> int:
    """Answer all prompts and print the answers, or one JSON document."""
    answers, timing = engine.answer(prompts, [sampling_of(args, i) for i in range(len(prompts))])
    if args.json:
        print(json.dumps(_document(engine, prompts, answers, timing), indent=2))
        return 0
    for answer in answers:
        print(engine.tokenizer.decode(answer.tokens), end="\n\n")
    print(_statistics(answers, timing), file=sys.stderr)
    return 0


def _document(
    engine: LocalEngine, prompts: list[TokenizedPrompt], answers: list[Answer], timing: RunTiming
) -> dict[str, object]:
    """Build the JSON document of answers and statistics."""
    return {
        "answers": [
            {
                "text": engine.tokenizer.decode(answer.tokens),
                "domain": prompt.domain,
                "prompt_tokens": len(prompt.tokens),
                "tokens": len(answer.tokens),
                "finish_reason": answer.finish,
                "tokens_per_step": _tokens_per_step([answer]),
            }
            for prompt, answer in zip(prompts, answers, strict=True)
        ],
        "tokens_per_second": timing.tokens_per_second,
        "tokens_per_step": _tokens_per_step(answers),
        "step_milliseconds": timing.step_milliseconds,
        "distinct_4grams": distinct_4grams([answer.tokens for answer in answers]),
    }


def _tokens_per_step(answers: list[Answer]) -> float:
    """Return the mean number of tokens per speculative step, 1 without speculation."""
    drafts = sum(answer.drafts for answer in answers)
    return 1 + sum(answer.accepted for answer in answers) / drafts if drafts else 1.0


def _statistics(answers: list[Answer], timing: RunTiming) -> str:
    """Format the statistics of a run as one line."""
    return (
        f"[{sum(len(answer.tokens) for answer in answers)} tokens, {timing.tokens_per_second:.1f} tokens/s, "
        f"{_tokens_per_step(answers):.2f} tokens/step, {timing.step_milliseconds:.1f} ms/step, "
        f"{100 * distinct_4grams([answer.tokens for answer in answers]):.0f} % distinct 4-grams]"
    )
