"""Tests of rendering in processes with limits of time, memory and output."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specdecode_worker.models.chat_template import ChatTemplate
from specdecode_worker.models.errors import TemplateRefused
from specdecode_worker.server.prompts import TemplatePool

pytestmark = pytest.mark.slow

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SOURCE = (
    "{% set said = messages[0].content %}"
    "{% if said == 'loop' %}" + LOOP + "{% endif %}"
    "{% if said == 'output' %}{% for a in range(99999) %}{{ 'x' * 10000 }}{% endfor %}{% endif %}"
    "{% if said == 'memory' %}{{ ('x' * said | length * 400000000) | length }}{% endif %}"
    "{% if said == 'raise' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ bos_token }}{{ said }}{{ tools | tojson if tools }}{{ flavor }}{{ '>' if add_generation_prompt }}"
)


@pytest.fixture(scope="module")
def pool() -> Iterator[TemplatePool]:
    pool = TemplatePool(ChatTemplate(SOURCE, {"bos_token": "<s>"}, "tools: " + SOURCE))
    pool.start()
    yield pool
    pool.close()


def render(pool: TemplatePool, content: str, **options: Any) -> str:
    return pool.render({"messages": [{"role": "user", "content": content}], **options})


@pytest.mark.parametrize("content", ["hi", "", "é你✨", 'quote " \\ \n \u2028 \x00', "\ud800", "x" * 1_000_000])
def test_texts_are_those_of_the_template(pool: TemplatePool, content: str) -> None:
    template = ChatTemplate(SOURCE, {"bos_token": "<s>"}, "tools: " + SOURCE)
    tools = [{"type": "function", "function": {"name": "é", "parameters": {"b": 1.5, "a": None}}}]
    for options in ({}, {"add_generation_prompt": False}, {"tools": tools}, {"variables": {"flavor": "sweet"}}):
        expected = template.render(
            [{"role": "user", "content": content}],
            options.get("tools", []),
            options.get("variables", {}),
            add_generation_prompt=options.get("add_generation_prompt", True),
        )
        assert render(pool, content, **options) == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("loop", "was stopped"),
        ("output", "rendered more than 8388608 characters"),
        ("memory", "too much memory"),
        ("raise", "roles must alternate"),
    ],
)
def test_templates_are_refused_at_their_limits_and_render_afterwards(
    pool: TemplatePool, content: str, reason: str
) -> None:
    with pytest.raises(TemplateRefused, match=reason):
        render(pool, content)
    assert render(pool, "hi") == "<s>hi>"


def test_variables_that_cannot_be_passed_are_refused(pool: TemplatePool) -> None:
    with pytest.raises(TemplateRefused, match="cannot be rendered"):
        render(pool, "hi", variables={"flavor": 10**5000})
    assert render(pool, "hi") == "<s>hi>"


def test_threads_share_the_processes(pool: TemplatePool) -> None:
    with ThreadPoolExecutor(16) as threads:
        texts = list(threads.map(lambda number: render(pool, str(number)), range(16)))
    assert texts == [f"<s>{number}>" for number in range(16)]
    command_lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in _child_pids()]
    assert len([line for line in command_lines if b"template_process" in line]) <= 2


def test_closed_pool_leaves_no_process() -> None:
    pool = TemplatePool(ChatTemplate("x", {}))
    pool.start()
    # By pid: the pool of the other tests may start and end processes meanwhile. The command line of a new process is
    # that of its parent until it runs its own program.
    (started,) = (str(renderer._process.pid) for renderer in pool._renderers)
    assert started in _child_pids()
    pool.close()
    assert started not in _child_pids()


def _child_pids() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())
