"""Cases of `guided_schemas.py`: chosen schemas of JSONSchemaBench with their prompts and grammars.

guided_schemas.tsv names the chosen schemas with their digests, so that every run answers the same ones. The schemas
themselves are read from a clone of the benchmark, or from an archive of the chosen ones (`write_archive`).
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from specdecode_worker.commands.local_engine import LocalEngine
from specdecode_worker.guided.grammars import GrammarCompiler, json_grammar
from specdecode_worker.guided.guide import GrammarRefused


def question(schema: Any) -> str:
    """Return the message that asks for an example of a schema."""
    return f"Write one short example that fits this JSON schema. Answer with JSON only.\n{json.dumps(schema)}"


EXAMPLES = [
    {
        "role": "user",
        "content": question(
            {
                "type": "object",
                "properties": {
                    "title": {"type": "string", "description": "The title of the book"},
                    "year": {"type": "integer"},
                    "authors": {"type": "array", "items": {"$ref": "#/definitions/author"}},
                },
                "definitions": {"author": {"type": "object", "properties": {"name": {"type": "string"}}}},
                "required": ["title"],
            }
        ),
    },
    {"role": "assistant", "content": '{"title": "Emma", "year": 1815, "authors": [{"name": "Jane Austen"}]}'},
]
"""One example before each question, because small models otherwise repeat the schema."""


@dataclass(frozen=True, slots=True)
class Case:
    """One schema with its prompt and grammar. ``kind`` is the name of its class."""

    name: str
    kind: str
    schema: Any
    prompt: tuple[int, ...]
    grammar: str


CHOSEN = Path(__file__).with_name("guided_schemas.tsv")
"""One line for each chosen schema: class, name, and digest of its file."""
_SEED = 29


def choose(folder: Path, count: int, longest: int, local: LocalEngine) -> tuple[list[Case], Counter[str]]:
    """Choose ``count`` schemas evenly over the classes; return them and the numbers of unusable ones by reason.

    The order within a class is random, by a fixed seed. A schema is unusable if its grammar is refused, if its prompt
    is too long, or if it is no valid schema.
    """
    compiler = _compiler(local)
    kinds = sorted(path.name for path in folder.iterdir() if path.is_dir())
    left = {kind: sorted((folder / kind).glob("*.json")) for kind in kinds}
    for paths in left.values():
        random.Random(_SEED).shuffle(paths)
    cases: list[Case] = []
    skipped: Counter[str] = Counter()
    while len(cases) < count and any(left.values()):
        for kind in kinds:
            if left[kind] and len(cases) < count:
                path = left[kind].pop()
                case = read_case(path.read_bytes(), path.stem, kind, longest, local, compiler)
                if isinstance(case, Case):
                    cases.append(case)
                else:
                    skipped[f"{kind}: {case}"] += 1
    return cases, skipped


def write_choice(cases: Sequence[Case], folder: Path, chosen: Path = CHOSEN) -> None:
    """Write the list of chosen schemas, in the order in which they are answered."""
    lines = [f"{case.kind}\t{case.name}\t{_digest(_in_folder(folder, case.kind, case.name))}" for case in cases]
    chosen.write_text("\n".join(lines) + "\n")


def write_archive(source: Path, archive: Path, chosen: Path = CHOSEN) -> None:
    """Write the chosen schemas of ``source`` into one compressed file, which `read_cases` reads as well."""
    texts = _texts(source, chosen.read_text().splitlines())
    lines = [json.dumps({"class": kind, "name": name, "text": text.decode()}) for (kind, name), text in texts.items()]
    archive.write_bytes(lzma.compress("\n".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME))


def read_cases(source: Path, count: int, longest: int, local: LocalEngine, chosen: Path = CHOSEN) -> list[Case]:
    """Return the first ``count`` chosen schemas of ``source``, a clone's folder ``data`` or an archive, as cases.

    Raises:
        SystemExit: a schema is missing, differs from the one that was chosen, or cannot be used.
    """
    compiler = _compiler(local)
    cases = []
    for (kind, name), text in _texts(source, chosen.read_text().splitlines()[:count]).items():
        case = read_case(text, name, kind, longest, local, compiler)
        if not isinstance(case, Case):
            raise SystemExit(f"error: {kind}/{name} cannot be used ({case}); choose schemas again with --choose")
        cases.append(case)
    return cases


def read_case(
    data: bytes, name: str, kind: str, longest: int, local: LocalEngine, compiler: GrammarCompiler
) -> Case | str:
    """Read one schema. Return the reason if it cannot be used."""
    schema = json.loads(data)
    text = json.dumps(schema)
    if len(text) > 8 * longest:
        return "too long"
    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
        grammar = json_grammar(schema)
        compiler.check(grammar)
    except jsonschema.SchemaError:
        return "no schema"
    except GrammarRefused:
        return "refused"
    prompt = local.tokenizer.chat([*EXAMPLES, {"role": "user", "content": question(schema)}])
    return Case(name, kind, schema, tuple(prompt), grammar) if len(prompt) <= longest else "too long"


def _texts(source: Path, lines: Sequence[str]) -> dict[tuple[str, str], bytes]:
    """Return the files of the schemas that ``lines`` of the list name. Raise SystemExit if one differs."""
    archived: dict[tuple[str, str], bytes] = {}
    if source.is_file():
        for line in lzma.decompress(source.read_bytes()).decode().splitlines():
            entry = json.loads(line)
            archived[entry["class"], entry["name"]] = entry["text"].encode()
    texts: dict[tuple[str, str], bytes] = {}
    for line in lines:
        kind, name, digest = line.split("\t")
        text = archived.get((kind, name)) if source.is_file() else _in_folder(source, kind, name)
        if text is None:
            raise SystemExit(f"error: {source} has no {kind}/{name}")
        if _digest(text) != digest:
            raise SystemExit(f"error: {kind}/{name} in {source} is not the schema that was chosen")
        texts[kind, name] = text
    return texts


def _in_folder(folder: Path, kind: str, name: str) -> bytes | None:
    path = folder / kind / f"{name}.json"
    return path.read_bytes() if path.is_file() else None


def _digest(text: bytes | None) -> str:
    return hashlib.sha256(text or b"").hexdigest()[:16]


def _compiler(local: LocalEngine) -> GrammarCompiler:
    return GrammarCompiler(lambda: local.tokenizer.json, local.engine.vocab_size, local.engine.eos_token_ids)


def is_valid(local: LocalEngine, case: Case, answer: Sequence[int]) -> bool:
    """Return whether an answer is JSON that fits its schema under the package jsonschema."""
    try:
        value = json.loads(local.tokenizer.decode(answer))
        validator = jsonschema.validators.validator_for(case.schema)
        return bool(validator(case.schema).is_valid(value))
    except ValueError:
        return False
