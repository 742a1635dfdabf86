"""Callbacks of bigtrain in real runs, with real servers: messages, metrics, progress."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import tempfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from prometheus_client.parser import text_string_to_metric_families

from bigtrain.errors import EXIT_STOPPED
from bigtrain.launchers.agent import WATCHER
from bigtrain.metrics.step_metrics import names_of_kind
from bigtrain.run.run_view import RunView
from bigtrain.run.shipped import webhook_watcher
from bigtrain.run.shipped.trainjob import TrainJob
from bigtrain.settings.loading import load_run_config
from bigtrain.settings.sections.extensions import NoSettings
from tests.launch.conftest import STEPS, Inputs, launcher, start, wait
from tests.support.http_server import Receiver
from tests.support.lives import shared_server
from tests.support.worlds import ROOT, free_port

CODE = """
import os, signal, urllib.request

class At:
    ranks = "all"
    def __init__(self, step, get=None, to=None, fails=False, kills=None, stops=False):
        self.at, self.get, self.to, self.fails, self.kills = step, get, to, fails, kills
        self.stops = stops
    def step(self, view):
        if view.step != self.at:
            return
        if self.kills == view.rank:
            if self.get and os.fork() == 0:  # it holds whatever this process has open
                urllib.request.urlopen(self.get, timeout=60).close()
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.get and self.kills is None and view.rank == 0:
            with urllib.request.urlopen(self.get, timeout=60) as answer:
                text = answer.read()
            if self.to:
                open(self.to, "wb").write(text)
        if self.stops:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.fails:
            raise RuntimeError("<as asked>")
"""
RANK = """
import os, signal
from bigtrain.run.shipped.webhook import Webhook
from bigtrain.settings.loading import load_run_config
from bigtrain.settings.sections.extensions import WebhookSettings

config = load_run_config("quickstart", ["data.path=shards"])
Webhook(WebhookSettings(url_env="HOOK"), config, print)
os.kill(os.getpid(), signal.SIGKILL)
"""
SECRET = "/services/T000/B000/secret"


def arguments(inputs: Inputs, folder: Path, *callbacks: dict[str, Any]) -> list[str]:
    """Return the arguments of train.py for a run with `callbacks` and the module of `At`."""
    (folder / "at_step.py").write_text(CODE)
    changes = ["train.steps=6", "checkpoint.every_steps=4", "evaluation.every_steps=3"]
    changes.append(f"output.directory={folder / 'run'}")
    changes.append(f"callbacks={json.dumps(callbacks)}")
    return ["--config", str(inputs.run_yaml), *changes]


def live(
    inputs: Inputs, folder: Path, world_size: int, *callbacks: dict[str, Any], **more: Any
) -> tuple[list[int], str]:
    """Return exit codes and output of a run of forked processes."""
    worker = [str(ROOT / "tests/launch/extension_worker.py"), str(folder)]
    script = [*worker, *arguments(inputs, folder, *callbacks)]
    return shared_server().live([], world_size=world_size, script=script, **more)


def webhook(**settings: Any) -> dict[str, Any]:
    return {"type": "webhook", "settings": {"url_env": "HOOK", **settings}}


def at(step: int, **settings: Any) -> dict[str, Any]:
    return {"type": "at_step:At", "settings": {"step": step, **settings}}


def lines_of(run: Path) -> dict[int, dict[str, Any]]:
    texts = (run / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line for line in map(json.loads, texts) if "loss" in line}


def texts(server: Receiver) -> list[str]:
    return [post.tree["text"] for post in server.posts]


def secret_is_nowhere(folder: Path, output: str) -> bool:
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return "secret" not in output and not any(b"secret" in one for one in files)


@pytest.fixture
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a key and a certificate of 127.0.0.1 that it has signed."""
    folder = tmp_path_factory.mktemp("certificate")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    command += " -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 -keyout key -out both"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    with (folder / "both").open("a") as file:
        file.write((folder / "key").read_text())
    return folder / "both"


def test_all_of_them_in_one_run(inputs: Inputs, tmp_path: Path, certificate: Path) -> None:
    port = free_port()
    token = tmp_path / "token"
    token.write_text("a token\n")
    callbacks = (
        webhook(),
        {"type": "prometheus", "settings": {"port": port, "address": "127.0.0.1"}},
        {"type": "opentelemetry"},
        {"type": "trainjob"},
        at(3, get=f"http://127.0.0.1:{port}/metrics", to=str(tmp_path / "scraped.txt")),
    )
    with Receiver() as server, Receiver(certificate=certificate) as controller:
        environment = {
            "HOOK": server.url + SECRET,
            "OTEL_EXPORTER_OTLP_ENDPOINT": server.url,
            "OTEL_RESOURCE_ATTRIBUTES": "team=ours",
            "KUBEFLOW_TRAINER_SERVER_URL": f"{controller.url}/apis/x/trainjobs/y/status",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(certificate),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(token),
        }
        codes, output = live(inputs, tmp_path, 1, *callbacks, environment=environment)
        assert codes == [0], output
        [message] = [post for post in server.posts if post.path == SECRET]
        exported = [post for post in server.posts if post.path == "/v1/metrics"]
        count = len(server.posts)
        # Complete: there is nothing to do, and so nothing to report.
        codes, output = live(inputs, tmp_path, 1, *callbacks, environment=environment)
        assert (codes, len(server.posts)) == ([0], count), output
    rows = lines_of(tmp_path / "run")
    where = f"run run on {socket.gethostname()} ({tmp_path / 'run'})"
    text = f"bigtrain: {where} is complete, loss {rows[6]['loss']:.4g} [step 6 of 6]"
    assert message.tree == {"text": text}
    assert secret_is_nowhere(tmp_path, output)
    check_scraped((tmp_path / "scraped.txt").read_text(), rows[3])
    check_exported(exported[-1].body, rows[6])
    first, last = controller.posts[0], controller.posts[-1]
    assert {post.headers["Authorization"] for post in controller.posts} == {"Bearer a token"}
    assert first.path == "/apis/x/trainjobs/y/status"
    status = last.tree["trainerStatus"]
    sent = {one["name"]: one["value"] for one in status["metrics"]}
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (100, 0)
    assert float(sent["loss"]) == pytest.approx(rows[6]["loss"], rel=1e-9)
    assert (sent["step"], sent["total_steps"], sent["tokens"]) == ("6", "6", "1536")
    assert {"breakdown/data_seconds", "evaluation/held_out_loss"} <= sent.keys()
    assert status["lastUpdatedTime"].endswith("+00:00")


def check_scraped(text: str, row: dict[str, Any]) -> None:
    """Check that all metrics of a step, and only those known, are at the endpoint."""
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    plain = {one.name: one.value for one in samples if not one.labels}
    counts = {f"bigtrain_{name}_total": row[name] for name in names_of_kind("position")}
    measured = [name for name in names_of_kind("number") if name in row]
    numbers = {f"bigtrain_{name}": row[name] for name in measured}
    known = {name: value for name, value in numbers.items() if value is not None}
    assert plain == {"bigtrain_total_steps": 6, **counts, **known}
    entries = {one.labels["entry"]: one.value for one in samples if "entry" in one.labels}
    assert entries == {name: value for name, value in row["breakdown"].items() if value is not None}


def check_exported(body: bytes, row: dict[str, Any]) -> None:
    """Check the last OTLP request: resource, and the metrics of the last step."""
    [resource] = ExportMetricsServiceRequest.FromString(body).resource_metrics
    attributes = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert (attributes["service.name"], attributes["team"]) == ("bigtrain", "ours")
    metrics = {one.name: one for one in resource.scope_metrics[0].metrics}
    [loss] = metrics["bigtrain.loss"].gauge.data_points
    assert (loss.as_double, metrics["bigtrain.loss"].unit) == (row["loss"], "nats per token")
    [tokens] = metrics["bigtrain.tokens"].sum.data_points
    assert (tokens.as_double, metrics["bigtrain.tokens"].sum.is_monotonic) == (1536.0, True)
    entries = {
        point.attributes[0].value.string_value
        for point in metrics["bigtrain.evaluation"].gauge.data_points
    }
    assert "held_out_loss" in entries


@pytest.mark.slow
@pytest.mark.distributed
def test_a_stall_and_a_killed_rank(inputs: Inputs, tmp_path: Path) -> None:
    """Also if a process that the rank has forked lives on."""
    stalled = "has stalled: no step was finished for 1 s [step 2 of 6]"
    with Receiver() as server:
        awaited = {"/stalled": stalled, "/died": " has died"}
        server.opens = lambda path, posts: any(awaited[path] in post.tree["text"] for post in posts)
        waits = at(2, get=f"{server.url}/stalled")
        dies = at(4, kills=0, get=f"{server.url}/died")
        hook = webhook(stall_seconds=1)
        more = {"environment": {"HOOK": server.url + SECRET}}
        codes, output = live(inputs, tmp_path, 2, hook, waits, dies, **more)
        server.wait_for(lambda posts: any("has died" in post.tree["text"] for post in posts))
    assert codes[0] == -9
    assert [text.endswith(stalled) for text in texts(server)].count(True) == 1
    expected = f"({tmp_path / 'run'}) {webhook_watcher._KILLED} [step 4 of 6]"
    assert texts(server)[-1].endswith(expected)
    assert secret_is_nowhere(tmp_path, output)


def test_an_error_with_a_server_that_refuses(inputs: Inputs, tmp_path: Path) -> None:
    with Receiver(status=400) as server, tempfile.NamedTemporaryFile("w") as file:
        file.write(f"{server.url}{SECRET}\n")
        file.flush()
        hook = webhook(url_file=file.name)
        more = {"environment": {"OTEL_EXPORTER_OTLP_ENDPOINT": server.url}}
        otlp = {"type": "opentelemetry"}
        codes, output = live(inputs, tmp_path, 1, hook, at(2, fails=True), otlp, **more)
    [text] = [post.tree["text"] for post in server.posts if post.path == SECRET]
    assert ") has died: callbacks.1.type = 'at_step:At': step raised RuntimeError: " in text
    assert "&lt;as asked&gt;" in text
    assert text.endswith(" [step 2 of 6]")
    # As without the callback, and one line.
    assert codes == [2], output
    assert "step raised RuntimeError: <as asked>" in output
    assert output.count("webhook: ") == 1
    assert "webhook: message not sent: HTTP status 400\n" in output
    assert output.count("opentelemetry: ") == 1
    assert "opentelemetry: Failed to export metrics batch code: 400" in output
    assert secret_is_nowhere(tmp_path, output)


def test_a_signal(inputs: Inputs, tmp_path: Path) -> None:
    with Receiver() as server:
        more = {"environment": {"HOOK": server.url}}
        codes, _ = live(inputs, tmp_path, 1, webhook(), at(2, stops=True), **more)
    [text] = texts(server)
    assert codes == [EXIT_STOPPED]
    assert text.endswith(
        " was stopped by SIGTERM and saved; the same command resumes it [step 2 of 6]"
    )


@pytest.mark.parametrize(
    ("callback", "environment", "expected"),
    [
        (webhook(), {}, "variable HOOK is empty or not set on the main rank -> write http(s)://"),
        (webhook(), {"HOOK": "hooks/secret"}, "variable HOOK does not contain the address of a "),
        (
            {"type": "opentelemetry"},
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL=grpc is not supported -> "
            "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf",
        ),
    ],
    ids=["no address", "not an address", "grpc"],
)
def test_the_environment_of_the_main_rank_is_refused(
    callback: dict[str, Any],
    environment: dict[str, str],
    expected: str,
    inputs: Inputs,
    tmp_path: Path,
) -> None:
    codes, output = live(inputs, tmp_path, 1, callback, environment=environment)
    assert codes == [2]
    assert f"callbacks.0.type = '{callback['type']}': " in output
    assert expected in output
    assert "Traceback" not in output
    assert "secret" not in output
    assert not (tmp_path / "run").exists()


def test_a_server_that_never_answers(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}{SECRET}"
        settings = {"url": url, "timeout_seconds": 0.1, "run": "run x", "total_steps": 2}
        webhook_watcher.post(settings, "is complete", 2)
    assert capfd.readouterr().err == "webhook: message not sent: timed out\n"
    webhook_watcher.post({**settings, "url": "secret"}, "is complete", 2)
    assert capfd.readouterr().err == "webhook: message not sent: ValueError\n"


@pytest.mark.parametrize("status", [301, 307])
def test_a_redirect_is_not_followed_and_reported(
    status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """urllib would send a GET without the message, and count it as sent."""
    methods: list[str] = []

    class Moved(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            methods.append(self.command)
            self.send_response(status)
            self.send_header("Location", f"http://127.0.0.1:{port}/secret")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Moved) as server:
        port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        settings = {"url": f"http://127.0.0.1:{port}{SECRET}", "timeout_seconds": 10.0}
        webhook_watcher.post({**settings, "run": "run x", "total_steps": 2}, "is complete", 2)
        server.shutdown()
        thread.join()
    assert methods == ["POST"]
    error = capfd.readouterr().err
    assert error.startswith(f"webhook: message not sent: HTTP status {status} (moved")
    assert "secret" not in error


def test_a_trainjob_gets_few_updates(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one in five seconds, but the last one; one warning that they are refused."""
    config = load_run_config(str(inputs.run_yaml))
    first = RunView(0, 0, 0, {}, {}, Path("run"), config, 0, 1)
    warnings: list[str] = []
    with Receiver(status=403) as server:
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", server.url)
        reporter = TrainJob(NoSettings(), config, warnings.append)
        reporter.start(first)
        server.wait_for(lambda posts: bool(posts))
        for step in range(1, STEPS + 1):
            reporter.step(replace(first, step=step, metrics={"loss": math.inf}))
        with pytest.raises(AssertionError):
            server.wait_for(lambda posts: len(posts) > 1, 0.3)
        reporter.close(first)
    statuses = [post.tree["trainerStatus"] for post in server.posts]
    assert [one["progressPercentage"] for one in statuses] == [0, 100]
    assert {"name": "loss", "value": "inf"} in statuses[1]["metrics"]
    assert warnings == ["trainjob: progress cannot be reported: HTTP status 403"]


@pytest.mark.slow
@pytest.mark.distributed
def test_another_rank_is_killed_under_a_launcher(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = launcher("deepspeed")
    command += arguments(inputs, tmp_path, webhook(), at(3, kills=1))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    with Receiver() as server:
        monkeypatch.setenv("HOOK", server.url + SECRET)
        finished = wait(start(command, tmp_path))
        server.wait_for(lambda posts: bool(posts))
    assert finished.code != 0
    port = command[command.index("--master_port") + 1]
    assert not list(Path("/dev/shm").glob(f"*_{port}_*")), "DeepSpeed's buffers are left behind"
    [text] = texts(server)
    assert "has died" in text
    assert "[step 3 of 6]" in text


@pytest.mark.slow
@pytest.mark.distributed
def test_the_agent_waits_for_the_last_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first process of a container, whose end ends all others. The rank has no model: it
    uses the callback, and kills itself."""
    (tmp_path / "rank.py").write_text(RANK)
    command = ["-m", "bigtrain.launchers.agent", "--standalone", "--nproc_per_node", "1"]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Receiver(held=True) as server:
        monkeypatch.setenv("HOOK", server.url + SECRET)
        process = start([*command, tmp_path / "rank.py"], tmp_path)
        server.wait_for(lambda posts: bool(posts))
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        server.release()
        finished = wait(process)
    assert finished.code == 128 + 9, finished.output
    assert WATCHER in webhook_watcher.__file__
    [text] = texts(server)
    assert text.endswith(f"{webhook_watcher._KILLED} [before its first step]")
