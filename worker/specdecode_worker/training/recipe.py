"""From a target to a head: record what it says, choose the draft's vocabulary, train, write the folder.

    OUT/recorded/shard-*.safetensors   conversations with the target's hidden states
    OUT/vocabulary.json                target ids of the draft's vocabulary
    OUT/checkpoint.pt                  what the next training step depends on
    OUT/history.json                   validation, line by line
    OUT/head/                          config.json, model.safetensors: the result so far; calibration.json at the end

Every stage goes on where it stopped: a killed run is repeated with the same flags.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specdecode_worker.models.eagle3 import Eagle3Head
from specdecode_worker.models.llama import Llama
from specdecode_worker.training.calibration import write_calibration
from specdecode_worker.training.chat import Chat
from specdecode_worker.training.data import DataSet
from specdecode_worker.training.export import write_head
from specdecode_worker.training.questions import PromptLine, TrainingQuestions
from specdecode_worker.training.recording import answer_tokens, record, text_conversations
from specdecode_worker.training.rollout import Rollout, RolloutSettings
from specdecode_worker.training.shards import shard_paths
from specdecode_worker.training.start import continued_head, frequent_tokens, new_head
from specdecode_worker.training.trainer import Trainer, TrainSettings

VALIDATION_CONVERSATIONS = 24

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What to record: a text file, or answers to ``prompts`` (none: the built-in ones and the target's own)."""

    tokens: int
    text: Path | None = None
    prompts: tuple[PromptLine, ...] = ()
    held_out: tuple[PromptLine, ...] = ()
    rows: int = 96
    answer_tokens: int = 320


def train_head(
    target: Llama,
    chat: Chat,
    material: Material,
    settings: TrainSettings,
    *,
    draft_vocab: int,
    origin: Eagle3Head | None,
    out: Path,
    tell: Tell,
) -> Path:
    """Returns the head's folder; training starts from ``origin``, or from the target's own weights.

    Raises PromptFileError, ResumeMismatch.
    """
    recorded = out / "recorded"
    gather(target, chat, material, settings.seed, recorded, tell)
    output_VE = target.lm_head.weight
    vocabulary = _vocabulary(out / "vocabulary.json", recorded, output_VE, draft_vocab)
    data = DataSet(recorded, validation=VALIDATION_CONVERSATIONS)
    head = continued_head(origin, target, vocabulary) if origin else new_head(target, vocabulary)
    trainer = Trainer(head, output_VE, data, settings)
    if trainer.restore(out):
        tell(f"train: going on from step {trainer.progress.step}")

    def keep(head: Eagle3Head) -> None:
        write_head(head, out / "head")
        (out / "history.json").write_text(json.dumps(trainer.progress.history, indent=1) + "\n")

    trainer.run(out, tell, keep)
    sharpness = write_calibration(trainer.head, data.validation, output_VE, out / "head", depth=settings.depth)
    tell(f"calibration: logits of sampled drafts times {sharpness} by depth")
    return out / "head"


def gather(target: Llama, chat: Chat, material: Material, seed: int, recorded: Path, tell: Tell) -> None:
    """Fills ``recorded`` up to the material's number of tokens."""
    recorded.mkdir(parents=True, exist_ok=True)
    have = answer_tokens(recorded)
    if have >= material.tokens:
        return
    if material.text is not None:
        conversations = text_conversations(target, chat, material.text, skip_tokens=have)
    else:
        seed = seed + len(shard_paths(recorded))  # a rollout that goes on asks new questions
        questions = TrainingQuestions(chat, material.held_out, seed, material.prompts)
        settings = RolloutSettings(rows=material.rows, answer_tokens=material.answer_tokens, seed=seed)
        around = chat.around_question()
        conversations = Rollout(
            target, settings, iter(questions), around=around, refuse=questions.refuse
        ).conversations()
    record(conversations, recorded, tokens=material.tokens, tell=tell)


def _vocabulary(path: Path, recorded: Path, output_VE: Tensor, size: int) -> Tensor:
    if not path.exists():
        found = frequent_tokens(shard_paths(recorded), output_VE, min(size, len(output_VE)))
        path.write_text(json.dumps(found.tolist()))
    return torch.tensor(json.loads(path.read_text()))
