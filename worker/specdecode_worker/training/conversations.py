"""Conversations as training reads them: token ids and states in shards, batches, and the draft's vocabulary."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdecode_worker.files import replacing
from specdecode_worker.models.chat_template import find_template
from specdecode_worker.models.vocabulary import open_tokenizer
from specdecode_worker.training.errors import TrainingError

# The target's tokenizer and chat template for training, which converts whole conversations at once.


class Chat:
    """Tokenizer and chat template of a target.

    Raises:
        TrainingError: The folder has no chat template.
        TokenizerProblem: The chat template cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = open_tokenizer(folder)
        template = find_template(folder)
        if template is None:
            raise TrainingError(f"{folder} has no chat template; training needs a chat model")
        self._template = template

    def render(self, messages: list[dict[str, str]]) -> str:
        """Return the conversation as text, up to where the assistant's answer starts."""
        return self._template.render(messages, add_generation_prompt=True)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without adding special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def ask(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the token ids of a conversation, up to where the assistant's answer starts."""
        return self.encode(self.render(messages))

    def around_question(self) -> tuple[list[int], list[int]]:
        """Return the ids before a user's question and the ids between it and its answer.

        They frame questions that are generated token by token.
        """
        mark = "QUESTION"
        before, after = self.render([{"role": "user", "content": mark}]).split(mark)
        return self.encode(before), self.encode(after)


# Recorded conversations on disk: tokens and the target's hidden states, in safetensors shards.
#
# A shard is written at once and never changed, so a killed rollout resumes with the next one. ``rollout.record_states``
# writes shards, `DataSet` reads them. The states are stored because the target computes them anyway during
# generation; computing them again would cost as much as a training step.

SHARD_TOKENS = 16384
"""Tokens at which a shard is written. They bound the states held in memory: 32 KiB a token for a target of 8B."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation with its hidden states. The answer starts at token ``answer_start``.

    ``tokens_N`` is int32. ``aux_NA`` [N, 3E] and ``hidden_NE`` [N, E] are the target's states at each token. The token
    after the last (an end of text, or text that was cut) is not stored: no slot reads it.
    """

    tokens_N: Tensor
    aux_NA: Tensor
    hidden_NE: Tensor
    answer_start: int
    temperature: float
    domain: str
    normalisers_NT: Tensor | None = None
    """Log normalizers [N, temperatures] fp32, see `prompts.normalise`; None if not computed."""


def write_shard(folder: Path, index: int, conversations: list[Conversation]) -> Path:
    """Write shard ``index`` through a temporary file and one rename, and return its path."""
    path = folder / f"shard-{index:05}.safetensors"
    lengths = [len(c.tokens_N) for c in conversations]
    tensors = {
        "tokens": torch.cat([c.tokens_N for c in conversations]).to(torch.int32),
        "aux": torch.cat([c.aux_NA for c in conversations]),
        "hidden": torch.cat([c.hidden_NE for c in conversations]),
        "lengths": torch.tensor(lengths, dtype=torch.int64),
        "answer_starts": torch.tensor([c.answer_start for c in conversations], dtype=torch.int64),
        "temperatures": torch.tensor([c.temperature for c in conversations], dtype=torch.float32),
    }
    with replacing(path) as partial:
        save_file(tensors, partial, {"domains": json.dumps([c.domain for c in conversations])})
    return path


def shard_paths(folder: Path) -> list[Path]:
    """Return the paths of the shards in ``folder``, in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def normalisers_path(shard: Path) -> Path:
    """Return the path of the file with a shard's normalizers, which are in the shard's order."""
    return shard.with_name(shard.name.replace("shard-", "normalisers-"))


def read_shard(path: Path) -> Iterator[Conversation]:
    """Yield the conversations of a shard, with normalizers if their file exists.

    The states are mapped from the file, so they take memory that the system can reclaim, however many shards are read.
    """
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a safe_open is no dict
        domains: list[str] = json.loads(file.metadata()["domains"])
    lengths = tensors["lengths"].tolist()
    parts = [tensors[name].split(lengths) for name in ("tokens", "aux", "hidden")]
    normalisers_file = normalisers_path(path)
    normalisers = (
        torch.split(load_file(normalisers_file)["normalisers"], lengths) if normalisers_file.exists() else None
    )
    for i, domain in enumerate(domains):
        yield Conversation(
            tokens_N=parts[0][i],
            aux_NA=parts[1][i],
            hidden_NE=parts[2][i],
            answer_start=int(tensors["answer_starts"][i]),
            temperature=float(tensors["temperatures"][i]),
            domain=domain,
            normalisers_NT=normalisers[i] if normalisers else None,
        )


# Training and validation sets of recorded conversations, and batches of similar length in shuffled order.
#
# The order is a function of (seed, epoch) alone, so a resumed run sees the same batches as an uninterrupted one.

# Batches are cut from pools of this many batches, sorted by length: little padding, still well mixed.
_POOL_BATCHES = 16


_VALIDATION_EVERY = 8


class DataSet:
    """Conversations of the shards in a folder, divided into training and validation. ``grow`` adds new shards.

    Every eighth greedy conversation of a domain is for validation, until there are ``validation`` in all or
    ``per_domain`` of the domain. All others are for training, except those with the same prompt as a validation
    conversation. Pieces of a text file have no prompt: they begin with one token.
    """

    def __init__(self, folder: Path, *, validation: int, per_domain: int | None = None) -> None:
        self.folder = folder
        self.training: list[Conversation] = []
        self.validation: list[Conversation] = []
        self._validation_size, self._per_domain = validation, per_domain or validation
        self._shards = 0
        self._greedy: Counter[str] = Counter()
        self._validation_counts: Counter[str] = Counter()
        self._asked: set[tuple[int, ...]] = set()

    def grow(self, limit: int | None = None) -> int:
        """Read new shards, up to ``limit`` in all, and return the number of shards in use."""
        for path in shard_paths(self.folder)[self._shards : limit]:
            self._shards += 1
            for conversation in read_shard(path):
                (self.validation if self._apart(conversation) else self.training).append(conversation)
        self.training = [c for c in self.training if _asked(c) not in self._asked]
        return self._shards

    def _apart(self, conversation: Conversation) -> bool:
        """Return whether the conversation is for validation."""
        domain = conversation.domain
        if conversation.temperature > 0 or len(self.validation) >= self._validation_size:
            return False
        self._greedy[domain] += 1
        if self._greedy[domain] % _VALIDATION_EVERY != 1 or self._validation_counts[domain] >= self._per_domain:
            return False
        self._validation_counts[domain] += 1
        if conversation.answer_start > 1:
            self._asked.add(_asked(conversation))
        return True


def _asked(conversation: Conversation) -> tuple[int, ...]:
    """Return the tokens of the prompt."""
    return tuple(conversation.tokens_N[: conversation.answer_start].tolist())


def answer_length(conversation: Conversation) -> int:
    """Return the number of answer tokens."""
    return len(conversation.tokens_N) - conversation.answer_start


def pieces(conversation: Conversation, most: int) -> Iterator[Conversation]:
    """Yield a conversation in pieces of at most ``most`` answer tokens, each with the whole text before it.

    They share its tensors. So a batch has a bounded number of slots to learn from, however long the conversation is.
    """
    if answer_length(conversation) <= most:
        yield conversation
        return
    for start in range(conversation.answer_start, len(conversation.tokens_N), most):
        end = min(start + most, len(conversation.tokens_N))
        normalisers_NT = conversation.normalisers_NT
        yield replace(
            conversation,
            tokens_N=conversation.tokens_N[:end],
            aux_NA=conversation.aux_NA[:end],
            hidden_NE=conversation.hidden_NE[:end],
            answer_start=start,
            normalisers_NT=None if normalisers_NT is None else normalisers_NT[:end],
        )


def batches(conversations: Sequence[Conversation], *, tokens: int, seed: int, epoch: int) -> list[list[Conversation]]:
    """Return the batches of one epoch, each of at most ``tokens`` answer tokens including padding."""
    rng = random.Random(f"{seed}/{epoch}")
    order = [piece for conversation in conversations for piece in pieces(conversation, tokens)]
    rng.shuffle(order)
    mean_length = sum(map(answer_length, order)) // max(1, len(order))
    per_pool = max(1, _POOL_BATCHES * tokens // max(1, mean_length))
    epoch_batches = [
        batch
        for start in range(0, len(order), per_pool)
        for batch in cut(sorted(order[start : start + per_pool], key=answer_length), answer_length, slots=tokens)
    ]
    rng.shuffle(epoch_batches)
    return epoch_batches


def cut(
    by_length: Sequence[Conversation], length: Callable[[Conversation], int], *, slots: int, most: int | None = None
) -> Iterator[list[Conversation]]:
    """Yield batches of conversations in the order of their length.

    Padded to its longest conversation, a batch has at most ``slots`` slots, and at most ``most`` conversations.
    """
    batch: list[Conversation] = []
    for conversation in by_length:
        # The newest conversation is the longest, so all rows of the batch would be padded to its length.
        if batch and (len(batch) == most or (len(batch) + 1) * length(conversation) > slots):
            yield batch
            batch = []
        batch.append(conversation)
    if batch:
        yield batch


# Choice of the draft vocabulary: the tokens that minimize the uncovered probability of the worst covered domain.
#
# Tokens are weighted by the probability that the target gives them in its own answers, by domain. This is a better
# estimate than the counts of the few sampled tokens. A vocabulary chosen by the mean over domains would drop the tokens
# of small domains. Instead, badly covered domains gain weight round by round, until none can improve without another
# getting worse (multiplicative weights for a zero-sum game between tokens and domains).

_PROBABILITY_ROWS = 512
_ROUNDS = 120
_STRENGTH = 8.0
"""Change of the domain weights in the first round, per uncovered probability. Later rounds change them less."""


@torch.inference_mode()
def domain_probabilities(shards: Iterable[Path], output_VE: Tensor, *, every: int = 8) -> dict[str, Tensor]:
    """Return for each domain the target's mean probability of each token, [V], over every ``every``-th answer token."""
    sums: dict[str, Tensor] = {}
    for path in shards:
        for conversation in read_shard(path):
            for states_RE in torch.split(conversation.hidden_NE[conversation.answer_start :: every], _PROBABILITY_ROWS):
                mass_RV = torch.softmax((states_RE.to(output_VE) @ output_VE.T).float(), dim=-1)
                mass_V = mass_RV.sum(dim=0).double().cpu()
                sums[conversation.domain] = sums.get(conversation.domain, torch.zeros(())) + mass_V
    return {domain: mass_V / mass_V.sum() for domain, mass_V in sorted(sums.items())}


def choose(probabilities_by_domain: dict[str, Tensor], size: int) -> Tensor:
    """Return ``size`` token ids in ascending order, [size].

    Of the vocabularies of all rounds, it is the one with the least uncovered probability in its worst domain.
    """
    mass_DV = torch.stack(list(probabilities_by_domain.values()))
    weight_D = torch.full((len(mass_DV),), 1 / len(mass_DV), dtype=torch.float64)
    best, least = torch.arange(size), 2.0
    for past in range(_ROUNDS):
        chosen = (weight_D @ mass_DV).topk(size).indices
        lacking_D = 1 - mass_DV[:, chosen].sum(dim=1)
        if float(lacking_D.max()) < least:
            best, least = chosen, float(lacking_D.max())
        weight_D = torch.softmax(weight_D.log() + _STRENGTH / (1 + past) ** 0.5 * lacking_D, dim=0)
    return best.sort().values


def uncovered(probabilities_by_domain: dict[str, Tensor], vocabulary: Tensor) -> dict[str, float]:
    """Return by domain the probability of the tokens outside ``vocabulary``."""
    return {domain: round(1 - float(mass_V[vocabulary].sum()), 4) for domain, mass_V in probabilities_by_domain.items()}
