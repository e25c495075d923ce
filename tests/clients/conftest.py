"""A real worker with the embedded model and its draft, a router before it, and environments of clients of others."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdecode_worker.commands.flags import EMBEDDED_TARGET
from specdecode_worker.models.fetch import default_cache_dir, resolve
from support.clients import ClientRunner, Site
from support.worker_process import ready, real, running_router


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    # The embedded model's own template takes no tools. In fp32, text and scores are the same with every draft.
    flags = ["--chat-template", str(Path(__file__).parent / "chat_template.jinja"), "--dtype", "float32"]
    flags += ["--device", "cpu", "--threads", "1", "--max-num-seqs", "4", "--max-model-len", "4096"]
    with (
        ready(real(flags, folder / "log")) as worker,
        running_router([worker.admin], folder / "log-router", worker.admin_token) as router,
    ):
        router.wait_ready()
        yield Site(worker, router)


@pytest.fixture
def site(started: Site) -> Iterator[Site]:
    """Yield worker and router. A test in which nothing was drafted fails."""
    started.push("chain:3")
    before = started.drafts
    yield started
    assert started.drafts > before, "no answer was speculative"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tokenizer of the embedded model, for clients that count tokens themselves."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(resolve(EMBEDDED_TARGET, default_cache_dir()) / name, folder)
    return folder


@pytest.fixture
def clients(tmp_path: Path) -> ClientRunner:
    return ClientRunner(tmp_path)
