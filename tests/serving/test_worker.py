"""`specdecode-worker serve` as users run it: the real engine on a small random Llama, called by OpenAI's client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from specdecode_worker.contract import CheckVerdict, Env, Plan, Route, SyntheticKnobs, TreeShape
from specdecode_worker.termination import ENV_PATH
from support.faults.raw_clients import connect, post_of
from support.small_model import flags
from support.worker_process import WorkerProcess, ready, real

GREEDY = {"temperature": 0.0, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
SAMPLED = GREEDY | {"temperature": 0.9, "top_p": 0.9, "seed": 5}


@pytest.fixture(scope="module")
def worker(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with ready(real(flags(*folders), tmp_path_factory.mktemp("log") / "log")) as started:
        yield started


@pytest.fixture
def client(worker: WorkerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{worker.public}/v1", api_key="none", max_retries=0)


@pytest.mark.core
def test_the_server_process_has_no_torch(worker: WorkerProcess) -> None:
    def loaded(pid: int) -> bool:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()

    assert loaded(worker.engine_pid), "this test looks for the wrong name"
    assert not loaded(worker.process.pid)


@pytest.mark.core
def test_speculation_does_not_change_the_text(client: openai.OpenAI, worker: WorkerProcess) -> None:
    texts: dict[str, set[str]] = {"greedy": set(), "sampled": set()}
    before = worker.report().drafts
    for version, shape in enumerate(("none", "chain:4", "tree:3,2", "none"), 101):
        plan = Plan(version=version, initial=TreeShape.parse(shape), max_depth=6, top_k=4, guard=False)
        worker.put_plan(plan)
        greedy = client.completions.create(model="small", prompt="once", **GREEDY)
        sampled = client.completions.create(model="small", prompt="once", **SAMPLED)
        texts["greedy"].add(greedy.choices[0].text)
        texts["sampled"].add(sampled.choices[0].text)
    assert worker.report().drafts > before, "nothing was drafted"
    assert {name: len(distinct) for name, distinct in texts.items()} == {"greedy": 1, "sampled": 1}
    assert texts["greedy"] != texts["sampled"]


def test_environment_knobs_apply_before_the_first_request(folders: tuple[Path, Path], tmp_path: Path) -> None:
    knobs = SyntheticKnobs.model_validate({"step_time": [{"seconds": 0.1}]})
    with ready(real(flags(*folders), tmp_path / "log", {Env.synthetic: knobs.model_dump_json()})) as worker:
        worker_report = worker.report()
        assert worker_report.synthetic == knobs
        assert {cell.draft_passes > 0 for cell in worker_report.steps} == {True, False}, (
            "plain steps and drafts were timed"
        )
        assert min(cell.t / cell.count for cell in worker_report.steps) >= 0.1
        assert "synthetic knobs are on" in worker.log
        worker.call_admin(Route.synthetic, "DELETE").raise_for_status()
        assert worker.report().synthetic is None


def test_prompt_that_fills_the_context_is_served(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="small", prompt="x" * 255, max_tokens=1)
    assert answer.usage.total_tokens == 256


def steps(worker: WorkerProcess) -> float:
    lines = worker.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("specdecode_iteration_seconds_count"))


@pytest.mark.parametrize("stream", [pytest.param(True, marks=pytest.mark.core), False])
def test_disconnect_with_several_choices_costs_one_step(worker: WorkerProcess, stream: bool) -> None:
    knobs = SyntheticKnobs.model_validate({"step_time": [{"seconds": 0.4}]})
    worker.call_admin(Route.synthetic, "PUT", content=knobs.model_dump_json()).raise_for_status()
    body = {"model": "small", "prompt": "long", "n": 3, "max_tokens": 200, "ignore_eos": True, "stream": stream}
    try:
        with connect(worker.public) as connection:
            connection.sendall(post_of("/v1/completions", body))
            worker.wait_until(lambda: worker.report().running == 3, 20)
            before = steps(worker)
        worker.wait_until(lambda: worker.report().running == 0, 20)
        # One step was running when the client disconnected, and one more began before the cancellation reached the
        # engine.
        assert steps(worker) - before <= 2
        assert worker.report().kv_tokens_used == 0
    finally:
        worker.call_admin(Route.synthetic, "DELETE").raise_for_status()


def test_requests_that_end_by_a_stop_string_are_finished(worker: WorkerProcess, client: openai.OpenAI) -> None:
    asked: Any = {"model": "small", "prompt": "measure", "temperature": 0, "max_tokens": 60}
    text = client.completions.create(**asked).choices[0].text
    before = worker.report()
    stopped = client.completions.create(**asked, stop=[text[20:23]]).choices[0]
    assert (stopped.finish_reason, text.startswith(stopped.text)) == ("stop", True)

    client.completions.create(model="small", prompt="next", max_tokens=1)  # the engine has read what was sent before
    after = worker.report()
    assert sum(cell.finished for cell in after.traffic) == sum(cell.finished for cell in before.traffic) + 2
    assert sum(cell.n for cell in after.requests) == sum(cell.n for cell in before.requests) + 2


def test_sigterm_under_load_loses_no_request(folders: tuple[Path, Path], tmp_path: Path) -> None:
    words = [*flags(*folders), "--endpoint-delay-seconds", "1"]
    answers: list[httpx.Response] = []
    stop = threading.Event()
    with ready(real(words, tmp_path / "log")) as worker:

        def load() -> None:
            while not stop.is_set():
                try:
                    answers.append(worker.complete("load", max_tokens=60, ignore_eos=True))
                except httpx.ConnectError:
                    return

        threads = [threading.Thread(target=load) for _ in range(6)]
        for thread in threads:
            thread.start()
        worker.wait_until(lambda: len(answers) > 6, 60)
        began = time.monotonic()
        worker.terminate()
        assert worker.exit_code(60) == 0, worker.log
        assert time.monotonic() - began > 1, "requests were not served during the endpoint delay"
        stop.set()
        for thread in threads:
            thread.join()
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert all(a.json()["usage"]["completion_tokens"] == 60 for a in answers if a.status_code == 200)


@pytest.mark.embedded
def test_embedded_model_answers_a_chat_request(tmp_path: Path) -> None:
    with real(["--threads", "1", "--max-num-seqs", "2", "--max-model-len", "512"], tmp_path / "log") as worker:
        worker.wait_ready(240)
        client = openai.OpenAI(base_url=f"{worker.public}/v1", api_key="none", max_retries=0)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        stream = client.chat.completions.create(
            model="smollm2-135m-instruct", messages=question, max_tokens=24, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert "Paris" in text


def test_insufficient_memory_writes_a_termination_message(folders: tuple[Path, Path], tmp_path: Path) -> None:
    last_words = tmp_path / "termination-log"
    last_words.write_text("")
    environment = {ENV_PATH: str(last_words)}
    with real([*flags(*folders), "--kv-cache-tokens", str(10**12)], tmp_path / "log", environment) as worker:
        assert worker.exit_code(240) == 1
        assert "- weights of the target" in worker.log, worker.log
    verdict = CheckVerdict.model_validate_json(last_words.read_text())
    assert (verdict.serves, verdict.fits) == (False, False)
    assert "kv_cache_tokens asks for 1,000,000,000,000" in verdict.problem
