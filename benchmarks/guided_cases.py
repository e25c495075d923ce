"""Cases of `guided_schemas.py`: schemas of a folder, chosen evenly over its classes, with prompts and grammars."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from specdecode_worker.commands.common.local_engine import LocalEngine
from specdecode_worker.guided.errors import GrammarRefused
from specdecode_worker.guided.grammar_compiler import GrammarCompiler
from specdecode_worker.guided.grammars import json_grammar


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


def read_cases(folder: Path, count: int, longest: int, local: LocalEngine) -> tuple[list[Case], Counter[str]]:
    """Choose ``count`` schemas evenly over the classes; return them and the numbers of unusable ones by reason.

    A schema is unusable if its grammar is refused, if its prompt is too long, or if it is no valid schema.
    """
    compiler = GrammarCompiler(lambda: local.tokenizer.json, local.engine.vocab_size, local.engine.eos_token_ids)
    kinds = sorted(path.name for path in folder.iterdir() if path.is_dir())
    left = {kind: sorted((folder / kind).glob("*.json")) for kind in kinds}
    for paths in left.values():
        random.Random(29).shuffle(paths)
    cases: list[Case] = []
    skipped: Counter[str] = Counter()
    while len(cases) < count and any(left.values()):
        for kind in kinds:
            if left[kind] and len(cases) < count:
                case = read_case(left[kind].pop(), kind, longest, local, compiler)
                if isinstance(case, Case):
                    cases.append(case)
                else:
                    skipped[f"{kind}: {case}"] += 1
    return cases, skipped


def read_case(path: Path, kind: str, longest: int, local: LocalEngine, compiler: GrammarCompiler) -> Case | str:
    """Read one schema. Return the reason if it cannot be used."""
    schema = json.loads(path.read_text())
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
    return Case(path.stem, kind, schema, tuple(prompt), grammar) if len(prompt) <= longest else "too long"


def is_valid(local: LocalEngine, case: Case, answer: Sequence[int]) -> bool:
    """Return whether an answer is JSON that fits its schema under the package jsonschema."""
    try:
        value = json.loads(local.tokenizer.decode(answer))
        validator = jsonschema.validators.validator_for(case.schema)
        return bool(validator(case.schema).is_valid(value))
    except ValueError:
        return False
