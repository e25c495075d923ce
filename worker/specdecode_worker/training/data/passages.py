"""Paragraphs, names and short functions of Python's standard library (license PSF-2.0), as text for training prompts.

Training prompts (``prompts``) ask about them, and the target's answers are trained on. Any machine with Python has
them. Modules are read as text and never imported, so they have no side effects.
"""

from __future__ import annotations

import ast
import functools
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

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
    paragraphs = (paragraph for tree in _trees() for text in _docstrings(tree) for paragraph in text.split("\n\n"))
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
    nodes = (node for tree in _trees() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
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


def _trees() -> Iterator[ast.Module]:
    yield from _parsed().values()


@functools.cache
def _parsed() -> dict[str, ast.Module]:
    """Return the syntax trees of ``MODULES`` by name, without modules that this Python lacks."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return {name: ast.parse(path.read_text()) for name in MODULES for path in _files(library, name)[:1]}


def _files(library: Path, module: str) -> list[Path]:
    candidates = (library / f"{module}.py", library / module / "__init__.py")
    return [path for path in candidates if path.is_file()]
