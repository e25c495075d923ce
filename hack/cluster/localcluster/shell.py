"""Calling other programs; their failures become `CommandFailed` with the end of what they said."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from localcluster.console import say
from localcluster.errors import CommandFailed

_TAIL_LINES = 25
_ADMINISTRATORS = "/usr/local/sbin:/usr/sbin:/sbin"
"""Folders of programs that `su` leaves out of PATH: it keeps the user's."""


def which(program: str) -> str | None:
    """Path of a program, as `run` finds it."""
    return shutil.which(program, path=_environment(None)["PATH"])


def run(
    argv: Sequence[object],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    hint: str = "",
) -> str:
    """Standard output of a program that must succeed; `hint` is appended to the error when it does not."""
    try:
        done = subprocess.run(
            [str(word) for word in argv],
            cwd=cwd,
            env=_environment(env),
            input=stdin,
            stdin=None if stdin is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise CommandFailed(f"{argv[0]} is not installed: hack/cluster/up installs what it needs.") from error
    if done.returncode != 0:
        raise CommandFailed(_explain(argv, done.returncode, done.stderr or done.stdout, hint))
    return done.stdout


def succeeds(argv: Sequence[object], *, env: Mapping[str, str] | None = None) -> bool:
    """Whether a program exits 0; whatever it prints is dropped."""
    done = subprocess.run(
        [str(word) for word in argv],
        env=_environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


def stream(argv: Sequence[object], *, log: Path, show: Callable[[str], str | None], hint: str = "") -> None:
    """Run a program that talks for long: everything goes to a log, what `show` makes of a line to the terminal."""
    words = [str(word) for word in argv]
    with (
        log.open("w") as file,
        subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            shown = show(line.rstrip())
            if shown is not None:
                say(f"    {shown}")
    if process.returncode != 0:
        raise CommandFailed(_explain(argv, process.returncode, log.read_text(), f"All of it is in {log}. {hint}"))


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{_ADMINISTRATORS}", **(more or {})}


def _explain(argv: Sequence[object], code: int, output: str, hint: str) -> str:
    tail = "\n".join("    " + line for line in output.strip().splitlines()[-_TAIL_LINES:])
    message = f"{Path(str(argv[0])).name} exited {code}: {' '.join(str(word) for word in argv)}\n{tail}"
    return f"{message}\n{hint}" if hint else message
