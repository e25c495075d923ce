"""The golden set: prompts by domain that never change, answered by the target; no draft may get slower on them.

It is frozen by the hash of its file, which a draft's lineage names: the next generation is held to the same prompts.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from specdecode_worker.capture import Record, opening_of
from specdecode_worker.engine.ipc.messages import Sampling
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.training.data.chat_tokens import Chat
from specdecode_worker.training.data.question_sources import greedy, read_prompts
from specdecode_worker.training.data.rollout import Rollout, RolloutSettings
from specdecode_worker.training.data.shards import Conversation, shard_paths, write_shard
from specdecode_worker.training.distillation.record_shards import Interrupted, Stopped, read_samples
from specdecode_worker.training.distillation.splits import Runs, Text, frames, own_runs, runs_of, shares_run, united
from specdecode_worker.training.evaluation.paired_steps import Sample

PREFIX = "golden/"
"""Of the names of its domains: a task of the traffic may be called the same."""
_ROWS = 32


@dataclass(frozen=True, slots=True)
class Golden:
    """``sha256`` is of the file; ``runs`` are the runs of tokens that no training text may share."""

    sha256: str
    samples: tuple[Sample, ...]
    runs: Runs


def golden_set(
    target: Llama, chat: Chat, prompts: Path, folder: Path, *, answer_tokens: int, stopped: Stopped
) -> Golden:
    """Answers the prompts greedily, once: they lie in ``folder`` afterwards. Raises PromptFileError, Interrupted."""
    if not shard_paths(folder):
        lines = read_prompts(prompts)
        settings = RolloutSettings(rows=min(_ROWS, len(lines)), answer_tokens=answer_tokens, for_training=False)
        found = []
        for conversation in Rollout(target, settings, greedy(lines, chat)).conversations():
            if stopped():
                raise Interrupted
            found.append(conversation)
        _write(folder, found, [_record(target, conversation) for conversation in found])
    samples = tuple(read_samples(folder))
    return Golden(hashlib.sha256(prompts.read_bytes()).hexdigest(), samples, runs_of_samples(samples))


def _write(folder: Path, conversations: list[Conversation], records: list[Record]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # The shard is what tells that all is there.
    (folder / "shard-00000.records").write_bytes(msgspec.msgpack.encode(records))
    write_shard(folder, 0, conversations)


@torch.inference_mode()
def _record(target: Llama, conversation: Conversation) -> Record:
    """As if it had been served: with the token that the last slot chooses."""
    last = int(target.logits(conversation.hidden_NE[-1:]).argmax())
    tokens = conversation.tokens_N.tolist()
    prompt = tokens[: conversation.answer_start]
    return Record(
        tokens=(*tokens, last),
        prompt_length=conversation.answer_start,
        sampling=Sampling(max_tokens=len(tokens) + 1 - len(prompt), seed=0, temperature=0.0),
        target="",
        task=PREFIX + conversation.domain,
        time_seconds=0.0,
        opening=opening_of(" ".join(map(str, prompt))),
    )


def runs_of_samples(samples: Sequence[Sample]) -> Runs:
    """All runs of tokens of these texts but the frames of their domains."""
    texts = [text_of(sample.record.opening, sample.conversation) for sample in samples]
    frame = frames(texts)
    return united([own_runs(text, frame) for text in texts])


def apart_from(conversations: Sequence[Conversation], judged: Runs) -> list[Conversation]:
    """Those that share no run of tokens with ``judged``."""
    texts = [text_of(str(i), conversation) for i, conversation in enumerate(conversations)]
    frame = frames(texts)
    pairs = zip(conversations, texts, strict=True)
    return [conversation for conversation, text in pairs if not shares_run(own_runs(text, frame), judged)]


def text_of(name: str, conversation: Conversation) -> Text:
    tokens = conversation.tokens_N.tolist()
    start = conversation.answer_start
    return Text(name, conversation.domain, tokens[:start], runs_of(tokens[start:]))


def by_conversation(samples: Sequence[Sample]) -> dict[str, dict[str, list[Sample]]]:
    """By domain, then by conversation: turns of one are one."""
    found: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        found[sample.record.task][sample.record.opening].append(sample)
    return found
