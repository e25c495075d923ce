"""The entry point as the first process of a container."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.tiers import skip_reason

PROGRAM = "from specdecode_worker.__main__ import main; main(['distill', '--capture', 'captured', '--out', 'out'])"
SLOW_IMPORT = "import sys, time, types; sys.meta_path.insert(0, types.SimpleNamespace(find_spec=lambda name, *_: "
SLOW_IMPORT += "(print('importing', flush=True), time.sleep(30))[0] if name.endswith('commands.distill') else None)); "


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason=skip_reason("root", "it makes a process namespace")
)
def test_first_process_of_a_container_ends_by_sigterm_while_it_imports_its_command() -> None:
    words = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", SLOW_IMPORT + PROGRAM]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as outer:
        assert outer.stdout.readline() == "importing\n"
        (inner,) = map(int, Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split())
        began = time.monotonic()
        os.kill(inner, signal.SIGTERM)
        try:
            assert outer.wait(10) == 128 + signal.SIGTERM
        finally:
            outer.kill()
    assert time.monotonic() - began < 10
