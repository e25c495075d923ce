"""`kubectl specdecode` against an API server made up of canned answers: what is asked, written and said of errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from specdecode_operator.plugin.cli import main
from specdecode_operator.state.learned import render_state
from support.operators.fleet import loop_over
from support.operators.statuses import polled, resource_of

ROOT = "/apis/specdecode.io/v1alpha1"
STATE = "/api/v1/namespaces/ns/configmaps/demo-state"
DRAFTS = f"{ROOT}/namespaces/ns/specdecodedrafts"


class Server:
    """API server with an answer (status, body) by path, which records all writes."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.answers: dict[str, tuple[int, Any]] = {}
        self.written: list[tuple[str, str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self.do_PATCH()

            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.written.append((self.path.partition("?")[0], self.headers["Content-Type"], body))
                self._answer()

            def _answer(self) -> None:
                status, body = server.answers.get(self.path.partition("?")[0], (404, "404 page not found"))
                data = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = Thread(target=self.http.serve_forever, args=(0.02,))
        self.thread.start()
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(config(f"http://127.0.0.1:{self.http.server_port}")))

    def stop(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()

    def says(self, command: str, *words: str) -> str:
        """Return what a command writes to its output."""
        assert main([command, "--kubeconfig", str(self.kubeconfig), *words]) == 0
        return self.capsys.readouterr().out

    def refuses(self, command: str, *words: str) -> str:
        """Return the error of a command: one sentence, no traceback."""
        assert main([command, "--kubeconfig", str(self.kubeconfig), *words]) == 1
        return said(self.capsys)


def config(url: str) -> dict[str, Any]:
    """A kubeconfig whose context is of namespace ns."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "ns"}}],
        "current-context": "x",
    }


def said(capsys: pytest.CaptureFixture[str]) -> str:
    output = capsys.readouterr()
    assert not output.out
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1, "one sentence, no traceback"
    return output.err


def refusal(code: int, message: str) -> tuple[int, dict[str, Any]]:
    return code, {"kind": "Status", "status": "Failure", "message": message, "code": code}


@pytest.fixture
def server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Server]:
    running = Server(tmp_path, capsys)
    yield running
    running.stop()


@pytest.fixture
def demo(server: Server) -> str:
    """A deployment called demo in namespace ns, and its memory; the path of the resource."""
    loop = loop_over(speculation={"tasks": [{"name": "code"}]})
    polled(loop, 6)
    resource = resource_of(loop.deployment)
    path = f"{ROOT}/namespaces/ns/specdecodedeployments/demo"
    server.answers[path] = 200, resource
    server.answers[STATE] = 200, {"data": render_state(loop.memory.learned)}
    server.answers[STATE.replace("-state", "-plan")] = (
        200,
        {"data": {"plan.json": loop.memory.learned.plan.model_dump_json()}},
    )
    server.answers[DRAFTS] = 200, {"items": []}
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("-n", "other", "history", "demo"),
        ("history", "demo", "-n", "other"),
        ("--namespace=other", "history", "demo"),
        ("-n", "ns", "history", "demo", "-n", "other"),
    ],
)
def test_options_stand_before_or_after_the_command_and_the_one_after_it_wins(
    server: Server, demo: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    server.answers[f"{ROOT}/namespaces/other/specdecodedeployments/demo"] = server.answers.pop(demo)
    assert main(["--kubeconfig", str(server.kubeconfig), *words]) == 0
    assert "no decisions for demo" in capsys.readouterr().out
    assert main([*words, "--kubeconfig", str(server.kubeconfig)]) == 0


@pytest.mark.parametrize("answer", [{}, {"data": None}, {"data": {"state": "{"}}, []])
def test_explain_without_readable_state_says_so(server: Server, demo: str, answer: object) -> None:
    server.answers[STATE] = 200, answer
    assert "has not stored any yet" in server.says("explain", "demo")


def test_explain_and_history_read_what_the_operator_wrote(server: Server, demo: str) -> None:
    assert "MEASUREMENTS" in server.says("explain", "demo")
    assert "no decisions for demo" in server.says("history", "demo")


def test_explain_without_the_right_to_read_config_maps(server: Server, demo: str) -> None:
    server.answers[STATE] = refusal(403, "configmaps is forbidden")
    text = " ".join(server.says("explain", "demo").split())
    assert "cannot be shown: you do not have the rights for this: configmaps is forbidden" in text
    assert "MEASUREMENTS" not in text
    assert "WORKERS" in text


def test_pin_writes_the_shape_of_a_task_and_nothing_else(server: Server, demo: str) -> None:
    assert "unpin demo" in server.says("pin", "demo", "code=chain:6")
    ((path, kind, body),) = server.written
    assert path == demo
    assert kind == "application/json-patch+json"
    assert body == [
        {"op": "test", "path": "/spec/speculation/tasks/0/name", "value": "code"},
        {"op": "add", "path": "/spec/speculation/tasks/0/pin", "value": "chain:6"},
    ]


def test_a_slip_is_refused_before_it_is_written(server: Server, demo: str) -> None:
    assert "no task 'sql'; there are code, other" in server.refuses("pin", "demo", "sql=chain:6")
    server.refuses("pin", "demo", "")
    assert not server.written


def test_unpin_removes_all_pins(server: Server, demo: str) -> None:
    server.says("unpin", "demo")
    assert server.written == [], "there is none"
    server.answers[demo][1]["spec"]["speculation"]["pin"] = "chain:2"
    assert "not pinned any more. Its mode is Auto." in server.says("unpin", "demo")
    assert server.written[0][2] == [{"op": "remove", "path": "/spec/speculation/pin"}]


def test_pin_of_a_paused_deployment_says_that_it_waits(server: Server, demo: str) -> None:
    server.answers[demo][1]["spec"]["paused"] = True
    assert "takes effect when" in server.says("pin", "demo", "chain:2")


# --- errors -------------------------------------------------------------------------------------------------------


def test_no_crd(server: Server) -> None:
    assert "does not know specdecodedeployments.specdecode.io: install the chart" in server.refuses("history", "demo")


@pytest.mark.parametrize(
    ("code", "words"),
    [(403, "you do not have the rights"), (401, "the credentials are not valid"), (404, '"demo" not found')],
)
def test_a_refusal_is_told_in_words(server: Server, code: int, words: str) -> None:
    message = 'specdecodedeployments.specdecode.io "demo" not found'
    server.answers[f"{ROOT}/namespaces/ns/specdecodedeployments/demo"] = refusal(code, message)
    assert words in server.refuses("history", "demo")


def test_a_server_that_does_not_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config("http://127.0.0.1:9")))
    assert main(["history", "demo", "--kubeconfig", str(kubeconfig)]) == 1
    assert "http://127.0.0.1:9 does not answer" in said(capsys)


def test_no_kubeconfig(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", "demo", "--kubeconfig", str(tmp_path / "absent")]) == 1
    assert "set KUBECONFIG" in said(capsys)


def test_no_such_context(server: Server) -> None:
    assert "other" in server.refuses("history", "demo", "--context", "other")


def test_a_resource_of_another_version(server: Server, demo: str) -> None:
    server.answers[demo][1]["spec"]["model"]["uri"] = 7
    assert "another API version than this plugin: model.uri" in server.refuses("explain", "demo")


def draft_resource(name: str = "demo-4f1c9a7be2d0", role: str = "Candidate", **status: object) -> dict[str, Any]:
    spec = {"deploymentRef": {"name": "demo"}, "uri": "pvc://drafts/new", "hash": "4f1c9a7be2d05c6e", "role": role}
    return {"metadata": {"name": name, "namespace": "ns", "uid": name}, "spec": spec, "status": status}


def test_try_offers_a_candidate(server: Server, demo: str) -> None:
    assert "kubectl specdecode drafts demo" in server.says("try", "demo", "pvc://drafts/new", "4f1c9a7be2d05c6e")
    ((path, _, body),) = server.written
    assert (path, body["kind"]) == (DRAFTS, "SpecDecodeDraft")
    assert body["metadata"] == {"name": "demo-4f1c9a7be2d0", "namespace": "ns"}
    assert body["spec"] == draft_resource()["spec"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(("drafts/new",), "URI is 'drafts/new'; write one of hf://"), (("pvc://drafts/new", "a b"), "HASH is 'a b'")],
    ids=["URI", "HASH"],
)
def test_a_slip_in_an_offer_is_named_and_not_written(
    server: Server, demo: str, words: tuple[str, ...], sentence: str
) -> None:
    assert sentence in server.refuses("try", "demo", *words)
    assert server.written == []


def test_try_repeats_a_trial_and_refuses_one_under_way(server: Server, demo: str) -> None:
    retired, tried = draft_resource(role="Retired", phase="Retired"), draft_resource(phase="Canary")
    path = f"{DRAFTS}/{retired['metadata']['name']}"
    server.answers[path] = (200, retired)
    server.answers[DRAFTS] = (200, {"items": [retired, {**retired, "spec": {"deploymentRef": {"name": "other"}}}]})
    server.says("try", "demo", "pvc://drafts/new")
    assert server.written == [(path, "application/merge-patch+json", {"spec": {"role": "Candidate"}})]
    server.answers[DRAFTS] = (200, {"items": [tried]})
    assert "offers this draft already; its phase is Canary" in server.refuses("try", "demo", "pvc://drafts/new")


def test_a_command_about_drafts_changes_the_role(server: Server, demo: str) -> None:
    status, resource = server.answers[demo]
    draft = {"phase": "Canary", "hash": "a", "current": {"hash": "a"}, "candidate": {"hash": "b"}}
    server.answers[demo] = status, {**resource, "status": {**resource["status"], "draft": draft}}
    tried = draft_resource(phase="Canary")
    server.answers[DRAFTS] = (200, {"items": [tried]})
    path = f"{DRAFTS}/{tried['metadata']['name']}"
    server.answers[path] = (200, tried)
    server.says("reject", "demo")
    assert server.written == [(path, "application/merge-patch+json", {"spec": {"role": "Retired"}})]
    assert "Canary, mode Canary" in server.says("drafts", "demo")


@pytest.mark.parametrize("command", ["promote", "reject", "rollback"])
def test_a_command_that_would_change_nothing_is_not_written(server: Server, demo: str, command: str) -> None:
    assert "phase Serving" in server.refuses(command, "demo")
    assert server.written == []


def test_a_command_to_train_is_written_if_a_run_can_begin(server: Server, demo: str) -> None:
    assert "distillation.capture is absent" in server.refuses("distill", "demo")
    status, resource = server.answers[demo]
    distillation = {"capture": {}, "storage": {"uri": "pvc://drafts"}}
    server.answers[demo] = status, {**resource, "spec": {**resource["spec"], "distillation": distillation}}
    server.says("distill", "demo")
    ((_, _, body),) = server.written
    request = body["spec"]["distillation"]["trigger"]["request"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\S+", request), "another one each time"
