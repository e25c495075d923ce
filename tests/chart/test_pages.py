"""Facts in README and docs/: generated parts are fresh, links hold, messages, specs and commands are the code's."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.api.v1alpha1 import Spec
from specdecode_operator.plugin.cli import _parser as plugin_parser
from specdecode_worker.commands.arguments import COMMANDS, new_parser
from support.kube import ROOT

PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = ("operator", "router", "worker", "helm", "hack", "simulator", "benchmarks")


def test_a_stale_part_and_a_broken_link_are_found(tmp_path: Path) -> None:
    for name in ("docs", "helm", "operator", "router", "worker", "simulator"):
        (tmp_path / name).symlink_to(ROOT / name) if name != "docs" else (tmp_path / "docs").mkdir()
    (tmp_path / "hack").mkdir()
    (tmp_path / "hack" / "docs").write_text((ROOT / "hack" / "docs").read_text())
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    for name in ("ARCHITECTURE.md", "README.md", "CHANGELOG.md"):
        (tmp_path / name).write_text("# Title\n\n[gone](docs/none.md) [no heading](README.md#none)\n")
    page = (ROOT / "docs" / "reference" / "helm-values.md").read_text()
    (tmp_path / "docs" / "helm-values.md").write_text(page.replace("`pollSeconds` | `5`", "`pollSeconds` | `6`"))
    done = subprocess.run([sys.executable, "hack/docs", "--check"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "helm-values.md is stale" in done.stderr
    assert "README.md: docs/none.md" in done.stderr
    assert "README.md: README.md#none" in done.stderr


@pytest.fixture(scope="module")
def source() -> str:
    """Return all text of the code, with string literals joined, as it is and with placeholders as dots."""
    files = [
        path for name in CODE for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".tpl", ".yaml", ".txt")
    ]
    files += [path for path in (ROOT / "hack").iterdir() if path.is_file()]
    text = "\n".join(path.read_text(errors="replace") for path in files)
    text = re.sub(r"[\"']\s*\n\s*[rf]*[\"']", "", text)
    filled = re.sub(r"\{[^{}]*\}|%[sd]", "...", text)
    return re.sub(r"\s+", " ", (text + filled).replace("\\", ""))


FOREIGN = (
    "exists and cannot be imported into the current release",
    "Additional property",
    "attempting to grant RBAC permissions not currently held",
    "certificate verify failed",
    "OOMKilled",
    "out of time",
)
"""Messages of Helm, Kubernetes and Python."""


def quoted_messages() -> Iterator[tuple[str, str]]:
    """Yield page and message of the tables whose first column is what a user sees."""
    for page in PAGES:
        for block in re.split(r"\n\n", page.read_text()):
            if re.match(r"\| (you see|message|REASON or message|answer) \|", block):
                for row in block.splitlines()[2:]:
                    for message in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
                        if " " in message and not message.startswith(("kubectl", "pinned")):
                            yield page.name, message


def test_quoted_messages_are_in_the_code(source: str) -> None:
    found = list(quoted_messages())
    assert len(found) >= 20
    missing = []
    for page, message in found:
        parts = [part.strip() for part in re.split(r"\.\.\.|\b[A-Z-]{3,}[a-z-]*\b|\bN\b|\b\d+\b|: ", message)]
        if not message.startswith(FOREIGN) and not all(part in source for part in parts if len(part) > 3):
            missing.append((page, message))
    assert missing == []


def yaml_blocks() -> Iterator[tuple[str, dict[str, Any]]]:
    for page in PAGES:
        for block in re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
            for document in yaml.safe_load_all(block):
                yield page.name, document


@pytest.mark.parametrize(
    ("page", "document"), list(yaml_blocks()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_spec_of_a_page_is_valid(page: str, document: dict[str, Any]) -> None:
    if document.get("kind") not in (None, "SpecDecodeDeployment"):
        return
    least = {"model": {"uri": "hf://org/model"}, "speculation": {"method": "ngram"}}
    spec = document.get("spec")
    if spec is None and document.keys() <= Spec.model_json_schema()["properties"].keys():
        spec = document
    if spec is None:
        return  # values of the chart
    merged = {**least, **spec}
    if "uri" not in merged["model"]:
        merged["model"] = {**least["model"], **merged["model"]}
    speculation = merged["speculation"]
    if not {"method", "draft"} & speculation.keys():
        merged["speculation"] = {**least["speculation"], **speculation}
    Spec.model_validate(merged, extra="forbid")


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield page and words of every worker and plugin command in the code blocks of the pages."""
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", page.read_text())
        for line in re.findall(r"^(?:    |\$ )(.*)$", text, re.MULTILINE):
            line = re.split(r"\s+#|\s+[|<>;&]", line)[0]
            found = re.search(r"(?:(specdecode-worker) (\w+)|kubectl (specdecode) (\w+))(.*)", line)
            if found and (found[2] in COMMANDS or found[3]):
                try:
                    words = shlex.split(found[0])
                except ValueError:
                    continue
                yield page.name, words


@pytest.mark.parametrize(
    ("page", "words"), list(commands()), ids=lambda value: "-".join(value[:3]) if isinstance(value, list) else value
)
def test_every_command_of_a_page_parses(page: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if "..." in words:
        words = [word for word in words if word != "..."]
    parser = plugin_parser() if words[0] == "kubectl" else new_parser(words[1])
    try:
        parser.parse_args(words[2:])
    except SystemExit:
        error = capsys.readouterr().err.splitlines()[-1]
        assert "required" in error, f"{page}: {' '.join(words)}: {error}"  # a line that shows a part of a command
