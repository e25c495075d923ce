"""Questions that a target answers for training, and log-normalizers of its answers."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import random
import re
import sysconfig
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors.torch import save_file
from torch import Tensor

from specdecode_worker.files import replacing
from specdecode_worker.training.conversations import Chat, normalisers_path, read_shard, shard_paths
from specdecode_worker.training.errors import PromptFileError

# Log normalizers of the target's distribution at recorded tokens, by temperature.
#
# Logits are not stored: training recomputes those of the draft vocabulary from the hidden state. The probability
# outside the draft vocabulary cannot be recomputed that way. A file next to each shard therefore stores the log of the
# sum over all tokens for every temperature of ``TEMPERATURES``. `conversations` reads both files.

TEMPERATURES = (0.3, 0.6, 0.8, 1.0)
"""Temperatures of the stored normalizers. 0.3 represents greedy requests.

At 0.3 nearly all probability is on the first token, but the distribution still has a gradient.
"""
_ROWS = 256


def normalise(folder: Path, output_VE: Tensor, log: Callable[[str], None] = lambda _: None) -> None:
    """Compute missing normalizer files shard by shard. A killed run resumes with the next shard."""
    missing = [path for path in shard_paths(folder) if not normalisers_path(path).exists()]
    for done, path in enumerate(missing, start=1):
        values = torch.cat([normalisers(c.hidden_NE, output_VE, c.answer_start) for c in read_shard(path)])
        with replacing(normalisers_path(path)) as partial:
            save_file({"normalisers": values}, partial)
        if done % 8 == 0 or done == len(missing):
            log(f"normalisers: {done} of {len(missing)} shards")


@torch.inference_mode()
def normalisers(hidden_NE: Tensor, output_VE: Tensor, answer_start: int) -> Tensor:
    """Return log sum exp(logit / temperature) at every token, [N, temperatures] fp32.

    Prompt tokens get zero, because no loss is computed there.
    """
    normalisers_NT = torch.zeros(len(hidden_NE), len(TEMPERATURES))
    for start in range(answer_start, len(hidden_NE), _ROWS):
        rows = slice(start, start + _ROWS)
        logits_RV = (hidden_NE[rows].to(output_VE) @ output_VE.T).float()
        columns = [torch.logsumexp(logits_RV / temperature, dim=-1) for temperature in TEMPERATURES]
        normalisers_NT[rows] = torch.stack(columns, dim=-1).cpu()
    return normalisers_NT


# Paragraphs, names and short functions of Python's standard library (license PSF-2.0), as text for training prompts.
#
# Training prompts (``prompts``) ask about them, and the target's answers are trained on. Any machine with Python has
# them. Modules are read as text and never imported, so they have no side effects.

# Modules with terms that a small model may know and with documentation in prose.
_NAMES = (
    "argparse ast base64 bisect calendar collections configparser contextlib copy csv dataclasses "
    "datetime difflib enum fileinput fractions functools getpass glob gzip hashlib heapq html imaplib "
    "inspect ipaddress json locale logging mailbox numbers os pathlib pickle platform poplib pprint "
    "queue random re sched secrets shelve shlex shutil smtplib socket socketserver sqlite3 ssl "
    "statistics string subprocess tarfile tempfile textwrap threading timeit tokenize traceback turtle "
    "typing unittest urllib uuid warnings wave weakref webbrowser zipfile"
)
MODULES = tuple(_NAMES.split())
_PROSE_WORDS = (30, 90)
_CODE_LINES = (3, 12)
_CODE_LETTERS = 480


@functools.cache
def passages() -> tuple[str, ...]:
    """Return paragraphs of prose of 30 to 90 words, each on one line."""
    paragraphs = (
        paragraph for tree in _parsed().values() for text in _docstrings(tree) for paragraph in text.split("\n\n")
    )
    return tuple(dict.fromkeys(" ".join(p.split()) for p in paragraphs if _is_prose(p)))


@functools.cache
def symbols() -> tuple[str, ...]:
    """Return public functions and classes, as ``module.name``."""
    return tuple(
        dict.fromkeys(
            f"{module}.{node.name}"
            for module, tree in _parsed().items()
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith(("_", "test"))
        )
    )


@functools.cache
def snippets() -> tuple[str, ...]:
    """Return the source of short functions without their docstrings."""
    nodes = (node for tree in _parsed().values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return tuple(dict.fromkeys(code for node in nodes if (code := _short_code(node)) is not None))


def _short_code(node: ast.FunctionDef) -> str | None:
    """Return the code of a function without its docstring.

    Return None if the function is private, has no other code, or its length is outside the limits.
    """
    documented = ast.get_docstring(node) is not None
    body = node.body[1:] if documented else node.body
    if not body or node.name.startswith("_"):
        return None
    code = ast.unparse(ast.FunctionDef(**{**dict(ast.iter_fields(node)), "body": body}, lineno=1))
    fits = _CODE_LINES[0] <= code.count("\n") + 1 <= _CODE_LINES[1] and len(code) <= _CODE_LETTERS
    return code if fits else None


def _is_prose(paragraph: str) -> bool:
    """Return whether a paragraph is prose of suitable length, without code or markup."""
    words = paragraph.split()
    plain = not re.search(r">>>|::|[=<>|{}\\]|^\s*[-*]", paragraph, re.MULTILINE)
    return plain and _PROSE_WORDS[0] <= len(words) <= _PROSE_WORDS[1] and paragraph.rstrip().endswith(".")


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield text


@functools.cache
def _parsed() -> dict[str, ast.Module]:
    """Return the syntax trees of ``MODULES`` by name, without modules that this Python lacks."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = {name: (library / f"{name}.py", library / name / "__init__.py") for name in MODULES}
    return {name: ast.parse(path.read_text()) for name, paths in files.items() for path in paths if path.is_file()}


# Training prompts: topics combined with forms of task, many thousand different questions from a few hundred words.
#
# The words are in prompts.toml. A rollout takes most of its questions from here. The target generates the others itself
# (see `TrainingQuestions`). Held-out prompts are in benchmarks/prompts/ and written by hand; ``overlaps`` keeps
# training prompts apart from them.

SELF_ASKED = "self-asked"
NGRAM_WORDS = 13


def draw(rng: random.Random) -> PromptLine:
    """Return a random prompt of the combinatorial set."""
    domains: dict[str, dict[str, Any]] = _lists()["domains"]
    domain = rng.choices(list(domains), [part["share"] for part in domains.values()])[0]
    form: str = rng.choice(domains[domain]["forms"])
    words = _words(rng)
    sentences = _lists()["words"]["sentence"]
    words["sentence"] = rng.choice(sentences).format_map(words)
    # Each sentence of a story draws its own words.
    words["story"] = " ".join(sentence.format_map(_words(rng)) for sentence in rng.sample(sentences, 4))
    return PromptLine(messages=(Message(role="user", content=form.format_map(words)),), domain=domain)


@functools.cache
def _lists() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "prompts.toml").read_text())


def _words(rng: random.Random) -> dict[str, str]:
    """Return a random word for every placeholder of the forms."""
    lists: dict[str, list[str]] = _lists()["words"]
    words = {name: rng.choice(lists[name]) for name in ("language", "task", "place", "mood")}
    words["topic"], words["other"] = rng.sample(lists["topic"], 2)
    words["person"], words["other_person"] = rng.sample(lists["person"], 2)
    for name, (least, most) in {"a": (20, 99), "b": (100, 999), "c": (2, 12), "d": (3, 15), "e": (4, 30)}.items():
        words[name] = str(rng.randint(least, most))
    words["percent"] = str(rng.choice([5, 10, 15, 20, 25, 30, 40, 50, 75]))
    for name in ("input", "goods", "entity", "concept"):
        words[name], words[f"{name}2"] = rng.sample(lists[name], 2)
    words["field"], words["field2"], words["field3"] = rng.sample(lists["field"], 3)
    for name in ("output", "code_language", "command", "problem"):
        words[name] = rng.choice(lists[name])
    return words | _identifiers(words) | _quoted(rng)


def _identifiers(words: dict[str, str]) -> dict[str, str]:
    """Return names of tables and columns made from the words, with underscores."""
    made = {"table": words["entity"] + "s", "column": words["field"], "column2": words["field2"]}
    return {name: word.replace(" ", "_") for name, word in made.items()}


def _quoted(rng: random.Random) -> dict[str, str]:
    """Return a random passage, symbol and code snippet of the standard library."""
    texts = {"passage": passages(), "symbol": symbols(), "snippet": snippets()}
    return {name: rng.choice(choices) for name, choices in texts.items()}


def ngrams(text: str, size: int = NGRAM_WORDS) -> set[tuple[str, ...]]:
    """Return the runs of ``size`` words of a text, in lower case and without punctuation. A shorter text is one run."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + size]) for i in range(max(1, len(words) - size + 1))}


def overlaps(text: str, held_out: Iterable[set[tuple[str, ...]]]) -> bool:
    """Return whether a training prompt shares a run of words with a held-out prompt.

    A prompt shorter than a run overlaps only with the same prompt.
    """
    mine = ngrams(text)
    return any(mine & theirs for theirs in held_out)


# Sources of the target's questions: prompt files, the combinatorial set, and questions that the target generates.
#
# Training never uses a held-out prompt: a combinatorial prompt (``prompts``) or a generated question that shares a run
# of words with one is dropped here.

# Temperatures of the answers and their shares: most requests are greedy, the other temperatures add variety.
TEMPERATURE_SHARES = ((0.0, 0.4), (0.6, 0.2), (0.8, 0.25), (1.0, 0.15))
SELF_ASKED_SHARE = 0.3  # share of conversations with a question that the target generates itself
LONGEST_PROMPT = 224  # tokens; longer built-in prompts are dropped


@dataclass(frozen=True, slots=True)
class Question:
    """Question to answer, with the temperature of its answer.

    ``ids`` is the conversation up to the answer, or None if the target generates the question.
    """

    ids: tuple[int, ...] | None
    temperature: float
    domain: str


class Message(BaseModel):
    """Chat message of a prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: str
    content: str


class PromptLine(BaseModel):
    """Line of a file of prompts: chat messages or a plain prompt, and its domain."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    messages: tuple[Message, ...] = ()
    prompt: str | None = Field(default=None, min_length=1)
    domain: str = "other"

    @model_validator(mode="after")
    def _one_of_two(self) -> PromptLine:
        if bool(self.messages) == (self.prompt is not None):
            raise ValueError('give either "messages" or "prompt"')
        return self

    @property
    def text(self) -> str:
        """Text of the prompt or of all its messages."""
        return self.prompt if self.prompt is not None else "\n".join(message.content for message in self.messages)

    def ids(self, chat: Chat) -> tuple[int, ...]:
        """Return the token ids to continue: a plain prompt unchanged, messages through the chat template."""
        if self.prompt is not None:
            return tuple(chat.encode(self.prompt))
        return tuple(chat.ask([message.model_dump() for message in self.messages]))


def read_prompts(path: Path) -> list[PromptLine]:
    """Return the lines of a file of prompts (JSON lines).

    Raises:
        PromptFileError: The file cannot be read, has no prompts or has an invalid line, which the message names.
    """
    return read_hashed_prompts(path)[0]


def read_hashed_prompts(path: Path) -> tuple[list[PromptLine], str]:
    """Return the lines of a file of prompts and the SHA-256 of its bytes, which are read once. Raises PromptFileError.

    The file may change at any time, for example in a ConfigMap.
    """
    try:
        content = path.read_bytes()
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None
    prompt_lines = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompt_lines.append(PromptLine.model_validate(json.loads(line)))
        except (ValueError, ValidationError) as error:
            raise PromptFileError(f"{path}, line {number}: {error}") from None
    if not prompt_lines:
        raise PromptFileError(f'{path} holds no prompts; write lines of {{"messages": [...]}} or {{"prompt": "..."}}')
    return prompt_lines, hashlib.sha256(content).hexdigest()


def greedy(lines: Sequence[PromptLine], chat: Chat) -> Iterator[Question]:
    """Yield each prompt of a file once, at temperature 0."""
    for line in lines:
        yield Question(line.ids(chat), 0.0, line.domain)


class TrainingQuestions:
    """Endless training questions: from ``own`` if given, else from the combinatorial set and the target itself.

    Prompts of more than ``longest`` tokens, and those that overlap with a held-out prompt, are dropped.

    Raises:
        PromptFileError: All of ``own`` are dropped.
    """

    def __init__(
        self,
        chat: Chat,
        held_out: Sequence[PromptLine],
        seed: int,
        own: Sequence[PromptLine] = (),
        longest: int = LONGEST_PROMPT,
    ) -> None:
        self._chat, self._longest, self._rng = chat, longest, random.Random(seed)
        self._held_out = [ngrams(line.text) for line in held_out]
        self._own = [usable for line in own if (usable := self._usable(line)) is not None]
        if own and not self._own:
            raise PromptFileError(f"all prompts overlap with held-out ones or exceed {longest} tokens; give other ones")

    def __iter__(self) -> Iterator[Question]:
        temperatures, shares = zip(*TEMPERATURE_SHARES, strict=True)
        while True:
            temperature = self._rng.choices(temperatures, shares)[0]
            if not self._own and self._rng.random() < SELF_ASKED_SHARE:
                yield Question(None, temperature, SELF_ASKED)
            elif (ids := self._draw_prompt()) is not None:
                yield Question(ids[0], temperature, ids[1])

    def _draw_prompt(self) -> tuple[tuple[int, ...], str] | None:
        """Return the token ids and domain of a random prompt, or None if it is dropped."""
        if self._own:
            return self._rng.choice(self._own)
        return self._usable(draw(self._rng))

    def _usable(self, line: PromptLine) -> tuple[tuple[int, ...], str] | None:
        """Return the token ids and domain of a prompt, or None if it is too long or held out."""
        ids = line.ids(self._chat)
        wanted = len(ids) <= self._longest and not overlaps(line.text, self._held_out)
        return (ids, line.domain) if wanted else None

    def is_refused(self, question: list[int]) -> bool:
        """Return whether a question that the target generated is shorter than three words or held out."""
        text = self._chat.tokenizer.decode(question)
        return len(text.split()) < 3 or overlaps(text, self._held_out)
