"""`--help` of every program: quick, without torch, and with a text for every flag."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import get_args

import pytest

from specdecode_operator.plugin.cli import _parser as plugin_parser
from specdecode_router.__main__ import _parser as router_parser
from specdecode_worker.commands import arguments
from specdecode_worker.training.artifacts import Names
from specdecode_worker.training.distillation.students import StudentSettings
from specdecode_worker.training.trainer import TrainSettings
from support.processor import MULTIPLIES_BF16

LIMIT_SECONDS = 0.5 if MULTIPLIES_BF16 else 0.75
"""Processor seconds; most of them import pydantic, for which older processors take half as long again."""
PROGRAMS = {
    **{f"worker {name}": ("specdecode_worker", name, "--help") for name in arguments.COMMANDS},
    "worker": ("specdecode_worker", "--help"),
    "router": ("specdecode_router", "serve", "--help"),
    "operator": ("specdecode_operator", "--help"),
    "plugin": ("specdecode_operator.plugin", "explain", "--help"),
}
PROGRAM = """
import resource, runpy, sys
from importlib import import_module
module, *sys.argv[1:] = sys.argv[1:]
try:
    name = "specdecode_operator.plugin.cli" if module == "specdecode_operator.plugin" else f"{module}.__main__"
    import_module(name).main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, "torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", PROGRAMS.values(), ids=PROGRAMS)
def test_help_is_quick_and_needs_no_torch(words: tuple[str, ...]) -> None:
    # The best of a few runs: other processes of the machine slow the others down.
    best = float("inf")
    for _ in range(10):
        done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)
        seconds, has_torch = done.stderr.split()[-2:]
        assert "usage:" in done.stdout
        assert has_torch == "False"
        best = min(best, float(seconds))
        if best < LIMIT_SECONDS:
            break
    assert best < LIMIT_SECONDS


def parsers() -> dict[str, argparse.ArgumentParser]:
    made = {name: arguments.new_parser(name) for name in arguments.COMMANDS}
    return {**made, "router": router_parser(), "plugin": plugin_parser()}


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the flags of a parser and of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                child.format_help()  # a % in a text that is no format raises
                yield from actions(child)
        else:
            yield action


@pytest.mark.parametrize("words", [("bench", "--rounds"), ("eval", "--concurrency")], ids=" ".join)
def test_no_rounds_and_no_requests_are_wrong_usage(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    command, flag = words
    with pytest.raises(SystemExit) as ended:
        arguments.new_parser(command).parse_args([flag, "0"])
    assert ended.value.code == 2
    assert "'0' is no number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "parser"), parsers().items(), ids=parsers())
def test_every_flag_has_a_help_text(name: str, parser: argparse.ArgumentParser) -> None:
    assert parser.description
    parser.format_help()
    assert [action.dest for action in actions(parser) if not action.help] == [], name


@pytest.mark.parametrize(
    ("command", "settings", "names"),
    [("train", TrainSettings(), {}), ("distill", StudentSettings(), {"depth": "unroll"})],
)
def test_defaults_of_training_are_those_of_its_settings(
    command: str, settings: TrainSettings | StudentSettings, names: dict[str, str]
) -> None:
    defaults = {action.dest: action.default for action in arguments.new_parser(command)._actions}
    flags = {one.name: names.get(one.name, one.name) for one in fields(settings)}
    # `train` bounds the time by default, and the settings bound nothing.
    compared = {one: flag for one, flag in flags.items() if flag in defaults and (command, one) != ("train", "minutes")}
    assert len(compared) >= 8
    assert {one: defaults[flag] for one, flag in compared.items()} == {one: getattr(settings, one) for one in compared}


def test_families_of_tensor_names_are_those_of_training() -> None:
    (names,) = (action for action in arguments.new_parser("train")._actions if action.dest == "names")
    assert names.choices == get_args(Names)
