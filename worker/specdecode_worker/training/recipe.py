"""The stages of training a draft: record the target's answers, choose the draft vocabulary, train, write the draft.

    OUT/recorded/target.json           the target, whose answers and states are here
    OUT/recorded/texts-*.msgpack       conversations, by the target's engine
    OUT/recorded/shard-*.safetensors   the same with the target's hidden states
    OUT/vocabulary.json                target ids of the draft's vocabulary
    OUT/checkpoint.pt                  everything that the next training step depends on
    OUT/history.json                   results of all validations
    OUT/head/                          config.json, model.safetensors: the best so far; at the end also
                                       calibration.json and lineage.json

Every stage resumes where it stopped: repeat a killed run with the same flags.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specdecode_worker.files import write_json
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.drafts import Draft, WeightMethod
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.models.weights import prepare_causal_lm
from specdecode_worker.training.artifacts import Ancestor, Names, lineage, write_draft
from specdecode_worker.training.conversations import (
    Chat,
    DataSet,
    choose,
    domain_probabilities,
    shard_paths,
    uncovered,
)
from specdecode_worker.training.errors import PromptFileError
from specdecode_worker.training.evaluation import write_calibration
from specdecode_worker.training.heads import (
    NEW_DRAFTS,
    prepare_draft,
)
from specdecode_worker.training.prompts import PromptLine, TrainingQuestions, normalise
from specdecode_worker.training.rollout import (
    Rollout,
    RolloutSettings,
    answer_tokens,
    read_texts,
    record_states,
    record_texts,
    text_pieces,
    texts_paths,
)
from specdecode_worker.training.split_target import TargetPlacement, target_engine
from specdecode_worker.training.trainer import Trainer, TrainSettings

VALIDATION_CONVERSATIONS, VALIDATION_PER_DOMAIN = 96, 8
_CALIBRATION_CONVERSATIONS = 32

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSettings:
    """Text to record: a text file, or the target's answers to ``prompts``.

    Without ``text`` and ``prompts``, the target answers built-in prompts and questions that it generates itself.
    ``tokens`` is the number of answer tokens to record. Training drops prompts that overlap with ``held_out``. ``rows``
    is the number of conversations generated at once.
    """

    tokens: int
    text: Path | None = None
    prompts: tuple[PromptLine, ...] = ()
    held_out: tuple[PromptLine, ...] = ()
    rows: int = 96
    answer_tokens: int = 320


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """Kind of draft to train and its origin, the weights of ``parent``."""

    target: Ancestor
    method: WeightMethod = "eagle3"
    draft_vocab: int = 8192
    layers: int = 1
    origin: Draft | None = None
    parent: Ancestor | None = None
    normalise: bool = True
    """Train on probabilities over the target's whole vocabulary.

    False: over the draft's vocabulary, which saves a pass over the data.
    """
    names: Names = "safeailab"

    @property
    def starts_layers(self) -> bool:
        """True if layers of the draft start as some of the target: all, or those that ``origin`` lacks."""
        origin = self.origin
        return origin is None or (isinstance(origin, Eagle3Head) and self.layers > origin.config.num_hidden_layers)


def train_draft(
    target: CausalLM,
    settings: TrainSettings,
    draft_settings: DraftSettings,
    out: Path,
    log: Log,
    whole: CausalLM | None = None,
) -> Path:
    """Train a draft for ``target`` on the texts in ``out`` (see `record_answers`) and return its folder.

    Training starts from ``draft_settings.origin``, or from the target's own weights if it is None. They are those of
    ``whole``, if given, where several devices share the layers of ``target``.

    Raises:
        TrainingError: PromptFileError, ResumeMismatch or DraftNotTrainable.
    """
    recorded, output_VE = out / "recorded", target.lm_head.weight
    record_states(target, recorded, log)
    if draft_settings.normalise:
        normalise(recorded, output_VE, log)
    _choose_vocabulary(out, output_VE, draft_settings, log)
    draft = _draft(target, whole, draft_settings, out, settings)
    data = DataSet(recorded, validation=VALIDATION_CONVERSATIONS, per_domain=VALIDATION_PER_DOMAIN)
    trainer = Trainer(draft.to(output_VE.device), output_VE, data, settings)
    if trainer.restore(out):
        log(f"train: going on from step {trainer.progress.step}")

    def save_best(draft: Draft) -> None:
        write_draft(draft, out / "head", draft_settings.target.folder, draft_settings.names)
        write_json(out / "history.json", trainer.progress.history)

    trainer.run(out, log, save_best)
    save_best(trainer.master)  # a kill between a draft and its checkpoint may have left one that the run lost again
    _finish(trainer, target, draft_settings, out, log)
    return out / "head"


def _draft(
    target: CausalLM, whole: CausalLM | None, draft_settings: DraftSettings, out: Path, settings: TrainSettings
) -> Draft:
    """Return the untrained draft that ``draft_settings`` describes, with the vocabulary stored in ``out``.

    Layers start as those of ``whole``, if given. What a draft shares with the target stays on the target's device.
    """
    if whole is not None:
        whole.model.embed_tokens, whole.lm_head = target.model.embed_tokens, target.lm_head
    source, known = whole or target, torch.tensor(json.loads((out / "vocabulary.json").read_text()))
    if draft_settings.origin is not None:
        return prepare_draft(draft_settings.origin, source, known, draft_settings.layers)
    kind = NEW_DRAFTS[draft_settings.method]
    return kind.make(source, known, draft_settings.layers, settings.depth)


def _finish(trainer: Trainer, target: CausalLM, draft_settings: DraftSettings, out: Path, log: Log) -> None:
    """Write the files that describe a trained draft: calibration and lineage."""
    data, folder, output_VE = trainer.data, out / "head", trainer.output_VE
    spread = data.validation[:: max(1, len(data.validation) // _CALIBRATION_CONVERSATIONS)]
    sharpness = write_calibration(trainer.head, spread, target, output_VE, folder, depth=trainer.settings.depth)
    log(f"calibration: logits of sampled drafts times {sharpness} by depth")
    document = lineage(
        trainer,
        method=draft_settings.method,
        target=draft_settings.target,
        parent=draft_settings.parent,
        uncovered=json.loads((out / "uncovered.json").read_text()),
    )
    write_json(folder / "lineage.json", document)


def record_answers(
    placement: TargetPlacement, chat: Chat, recording: RecordingSettings, seed: int, out: Path, log: Log
) -> None:
    """Record texts into ``out`` until they hold ``recording.tokens`` answer tokens.

    Raises:
        TrainingError: PromptFileError, or the target's answers are of no use.
        ModelError: The target cannot be loaded.
    """
    recorded = out / "recorded"
    recorded.mkdir(parents=True, exist_ok=True)
    have = answer_tokens(recorded)
    if have >= recording.tokens:
        return
    positions = prepare_causal_lm(placement.folder).network.config.max_position_embeddings
    if recording.text is not None:
        read = sum(len(text.tokens) for path in texts_paths(recorded) for text in read_texts(path))
        pieces = text_pieces(chat, recording.text, min(recording.answer_tokens, positions), skip_tokens=read)
        record_texts(pieces, recorded, tokens=recording.tokens, log=log)
        if not texts_paths(recorded):
            raise PromptFileError(f"{recording.text} is too short to learn from; name a longer text")
        return
    seed = seed + len(texts_paths(recorded))  # a resumed rollout asks new questions
    settings = RolloutSettings(rows=recording.rows, answer_tokens=recording.answer_tokens, seed=seed)
    longest_prompt = max((len(line.ids(chat)) for line in recording.prompts), default=settings.question_tokens)
    questions = TrainingQuestions(chat, recording.held_out, seed, recording.prompts, longest_prompt)
    longest = min(longest_prompt + settings.answer_tokens, positions)
    with target_engine(placement, rows=settings.rows, longest=longest) as engine:
        rollout = Rollout(
            engine, settings, iter(questions), around=chat.around_question(), is_refused=questions.is_refused
        )
        record_texts(rollout.texts(), recorded, tokens=recording.tokens, log=log)


def _choose_vocabulary(out: Path, output_VE: Tensor, draft_settings: DraftSettings, log: Log) -> None:
    """Write vocabulary.json unless it exists, and uncovered.json: the probability that it lacks, by domain."""
    path, uncovered_path = out / "vocabulary.json", out / "uncovered.json"
    if path.exists() and uncovered_path.exists():
        return
    probabilities_by_domain = domain_probabilities(shard_paths(out / "recorded"), output_VE)
    if not path.exists():
        size = len(output_VE)
        if NEW_DRAFTS[draft_settings.method].chooses_vocabulary:
            size = min(draft_settings.draft_vocab, size)
        origin = draft_settings.origin
        if isinstance(origin, Eagle3Head) and len(origin.target_ids) == size:
            chosen = origin.target_ids  # further training keeps the vocabulary that the draft knows
        else:
            chosen = choose(probabilities_by_domain, size)
        write_json(path, chosen.tolist())
    missing = uncovered(probabilities_by_domain, torch.tensor(json.loads(path.read_text())))
    log(f"vocabulary: probability of what the draft cannot say, by domain: {missing}")
    write_json(uncovered_path, missing)
