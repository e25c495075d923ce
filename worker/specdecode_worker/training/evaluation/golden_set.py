"""The golden set: fixed prompts by domain, answered by the target, on which no draft may lose speed.

The hash of its file is part of a draft's lineage, so the next generation is evaluated on the same prompts.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specdecode_worker.capture import Record, opening_hash
from specdecode_worker.engine.ipc.messages import Sampling
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.training.data.chat_tokens import Chat
from specdecode_worker.training.data.question_sources import greedy, read_prompts
from specdecode_worker.training.data.rollout import Rollout, RolloutSettings
from specdecode_worker.training.data.shards import Conversation, shard_paths
from specdecode_worker.training.distillation.record_shards import Interrupted, Stopped
from specdecode_worker.training.distillation.sample_shards import read_samples, write_samples
from specdecode_worker.training.distillation.splits import (
    Runs,
    Text,
    exclusive_runs,
    frames,
    runs_of,
    shares_run,
    union_of_runs,
)
from specdecode_worker.training.evaluation.paired_steps import Sample

PREFIX = "golden/"
"""Prefix of the names of golden domains, which keeps them apart from tasks of the traffic with the same name."""
_ROWS = 32


@dataclass(frozen=True, slots=True)
class Golden:
    """Samples of the golden set, with the hash of their file; None if there is no file.

    ``runs`` are the runs of tokens that no training text may share.
    """

    sha256: str | None
    samples: tuple[Sample, ...]
    runs: Runs


def golden_set(
    target: Llama, chat: Chat, prompts: Path, folder: Path, *, answer_tokens: int, stopped: Stopped
) -> Golden:
    """Return the golden set with the target's greedy answers, which are generated once and stored in ``folder``.

    Raises:
        PromptFileError: The file of prompts cannot be used.
        Interrupted: ``stopped`` returned True.
    """
    if not shard_paths(folder):
        lines = read_prompts(prompts)
        settings = RolloutSettings(rows=min(_ROWS, len(lines)), answer_tokens=answer_tokens, for_training=False)
        rollout = Rollout(target, settings, greedy(lines, chat))
        write_samples(folder, _samples(target, rollout.conversations(), stopped))
    samples = tuple(read_samples(folder))
    return Golden(hashlib.sha256(prompts.read_bytes()).hexdigest(), samples, runs_of_samples(samples))


def no_golden_set() -> Golden:
    """Return a golden set without prompts: the captured traffic alone decides."""
    return Golden(None, (), runs_of_samples(()))


def _samples(target: Llama, conversations: Iterable[Conversation], stopped: Stopped) -> Iterator[Sample]:
    """Yield the conversations as samples. Raise Interrupted when ``stopped`` returns True."""
    for conversation in conversations:
        if stopped():
            raise Interrupted
        yield Sample(_record(target, conversation), conversation)


@torch.inference_mode()
def _record(target: Llama, conversation: Conversation) -> Record:
    """Return the conversation in the form of a captured request.

    The record ends with the token that the target chooses after the conversation's last one.
    """
    last = int(target.logits(conversation.hidden_NE[-1:].to(target.lm_head.weight.device)).argmax())
    tokens = conversation.tokens_N.tolist()
    prompt = tokens[: conversation.answer_start]
    return Record(
        tokens=(*tokens, last),
        prompt_length=conversation.answer_start,
        sampling=Sampling(max_tokens=len(tokens) + 1 - len(prompt), seed=0, temperature=0.0),
        target="",
        task=PREFIX + conversation.domain,
        time_seconds=0.0,
        opening=opening_hash(" ".join(map(str, prompt))),
    )


def runs_of_samples(samples: Sequence[Sample]) -> Runs:
    """Return all runs of tokens of the samples except the frames of their domains."""
    texts = [text_of(sample.record.opening, sample.conversation) for sample in samples]
    frame = frames(texts)
    return union_of_runs([exclusive_runs(text, frame) for text in texts])


def exclude_overlapping(conversations: Sequence[Conversation], judged: Runs) -> list[Conversation]:
    """Return the conversations that share no run of tokens with ``judged``."""
    texts = [text_of(str(i), conversation) for i, conversation in enumerate(conversations)]
    frame = frames(texts)
    pairs = zip(conversations, texts, strict=True)
    return [conversation for conversation, text in pairs if not shares_run(exclusive_runs(text, frame), judged)]


def text_of(name: str, conversation: Conversation) -> Text:
    """Return a conversation in the form of the overlap check."""
    tokens = conversation.tokens_N.tolist()
    start = conversation.answer_start
    return Text(name, conversation.domain, tokens[:start], runs_of(tokens[start:]))


def by_conversation(samples: Sequence[Sample]) -> dict[str, dict[str, list[Sample]]]:
    """Group samples by domain and then by conversation: turns of one conversation share their opening."""
    groups: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        groups[sample.record.task][sample.record.opening].append(sample)
    return groups
