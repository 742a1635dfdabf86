"""Sites that train by train.py and meet at `bigtrain outer-server`; both may be killed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bigtrain.run.checkpointing import checkpoints
from tests.launch.conftest import STEPS, Inputs
from tests.launch.test_sites import outer_lines
from tests.support import site_world
from tests.support.lives import shared_server
from tests.support.outer_servers import outer_server as server_of_threads
from tests.support.outer_servers import rounds
from tests.support.worlds import ROOT, free_port

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

INNER_STEPS = 4


def start_server(
    directory: Path, port: int, *options: str, program: Sequence[str] = ("-m", "bigtrain.cli")
) -> subprocess.Popen[bytes]:
    directory.mkdir(exist_ok=True)
    token = directory / "token"
    token.write_text("0123456789abcdef0123456789abcdef\n")
    with (directory / "server.log").open("a") as file:
        return subprocess.Popen(
            [
                *(sys.executable, *program, "outer-server"),
                *("--directory", directory / "state", "--token-file", token),
                *("--host", "127.0.0.1", "--port", str(port)),
                *(options or ("--window-seconds", "30")),
            ],
            cwd=ROOT,
            stdout=file,
            stderr=file,
        )


@contextmanager
def outer_server(directory: Path, *options: str, port: int | None = None) -> Iterator[list[str]]:
    """A server of its own process; the settings with which sites reach it."""
    port, token = port or free_port(), directory / "token"
    process = start_server(directory, port, *options)
    try:
        yield [
            f"sites.server=http://127.0.0.1:{port}",
            f"sites.token_file={token}",
            f"sites.inner_steps={INNER_STEPS}",
            "sites.timeout_seconds=60",
        ]
    finally:
        process.terminate()
        process.wait(20)


def train_sites(
    inputs: Inputs,
    directory: Path,
    settings: Sequence[str],
    own: Sequence[Sequence[str]],
    ranks: int = 1,
    **more: Any,
) -> tuple[list[int], str]:
    """A site for each entry of `own`, its own settings, of so many ranks."""
    arguments = []
    for index, of_site in enumerate(own):
        place = [f"sites.index={index}", f"output.directory={directory / str(index)}"]
        common = ["--config", str(inputs.run_yaml), f"sites.count={len(own)}", *settings]
        arguments.append([*common, *place, *of_site])
    request = directory / "request.json"
    request.write_text(json.dumps({"ports": [free_port() for _ in own], "arguments": arguments}))
    script = [site_world.__file__, str(request)]
    return shared_server().live(
        [], script=script, world_size=ranks * len(own), grace_seconds=60.0, **more
    )


def assert_same_weights(directory: Path) -> None:
    first, second = (load_file(directory / site / "hf" / "model.safetensors") for site in "01")
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name


@pytest.mark.slow
def test_sites_with_other_layouts_and_shares_end_with_the_same_weights(
    inputs: Inputs, tmp_path: Path
) -> None:
    """Two ranks of ZeRO 0 that read 3 of 4 samples, and two of tensor parallelism."""
    own = [
        ["engine.deepspeed_config=zero0", "batch.micro_batch_size=1"],
        ["engine.deepspeed_config=zero1", "parallel.tensor=2"],
    ]
    with server_of_threads(tmp_path / "server", window_seconds=30.0) as meeting:
        settings = [f"sites.{key}={value}" for key, value in meeting.items()]
        settings += [f"sites.inner_steps={INNER_STEPS}", "sites.timeout_seconds=60"]
        settings += ["sites.codec=int8", "sites.shares=[3,1]"]
        codes, output = train_sites(inputs, tmp_path, settings, own, ranks=2)
        assert codes == [0, 0, 0, 0], output
        log = (tmp_path / "server/server.log").read_text()
        assert_same_weights(tmp_path)
        weights = load_file(tmp_path / "0" / "hf" / "model.safetensors")
        num_elements = sum(weight.numel() for weight in weights.values())
        for site in ("0", "1"):
            lines = outer_lines(tmp_path / site)
            assert [line["step"] for line in lines] == [4, 8, STEPS]
            assert [line["sites"] for line in lines] == [[0, 1]] * 3
            for line in lines:
                # A byte an element and a scale in 256, each once, whoever holds it twice.
                assert line["sent_bytes"] == pytest.approx(num_elements * (1 + 4 / 256), rel=0.01)
                assert 0 < line["distance"] < line["change"]
        assert "outer step 3 with site 0, 1" in log
        assert "site 1 left" in log
        # The server has the weights that both exported.
        state = load_file(sorted((tmp_path / "server/state").glob("state-*"))[-1])
        assert state["weights"].numel() == num_elements
    tokens = [record["tokens"] for record in rounds(tmp_path / "server/state")[1:]]
    assert tokens == [{"0": 4 * 6 * 32, "1": 4 * 2 * 32}] * 3


@pytest.mark.slow
def test_a_site_with_a_weight_that_is_not_finite_ends_and_the_other_goes_on(
    inputs: Inputs, tmp_path: Path
) -> None:
    """One element, in the step before the second outer step; it resumes from a good checkpoint."""
    settings = ["engine.deepspeed_config=zero1", "sites.codec=int8", "checkpoint.every_steps=2"]
    with outer_server(tmp_path / "server") as reach:
        codes, output = train_sites(
            inputs,
            tmp_path,
            [*settings, *reach],
            [(), ()],
            spoil={"rank": 1, "steps": {"8": "master"}},
        )
        assert codes == [0, 2], output
        assert "Traceback" not in output
        assert "step 8: site 1 would send the other sites a change with NaN" in output
        log = (tmp_path / "server/server.log").read_text()
        assert "site 1 left: a change with NaN or an infinity" in log
        assert [line["sites"] for line in outer_lines(tmp_path / "0")] == [[0, 1], [0], [0]]
        assert max(checkpoints.list_steps(tmp_path / "1")) == 6
        weights = load_file(tmp_path / "0" / "hf" / "model.safetensors")
        assert all(weight.isfinite().all() for weight in weights.values())


@pytest.mark.slow
def test_a_site_that_is_killed_is_left_out_and_takes_the_weights_when_it_is_back(
    inputs: Inputs, tmp_path: Path
) -> None:
    settings = ["engine.deepspeed_config=zero1", "checkpoint.asynchronous=false"]
    settings += ["checkpoint.every_steps=2", "train.steps=60"]
    with outer_server(tmp_path / "server", "--window-seconds", "1") as reach:
        # Site 1 dies in a save in the middle of a window, and site 0 goes on alone to the end.
        codes, output = train_sites(inputs, tmp_path, [*settings, *reach], [(), ()], die=(1, 40))
        assert codes[0] == 0, output
        assert codes[1] < 0
        lines = outer_lines(tmp_path / "0")
        assert lines[0]["sites"] == [0, 1]
        assert lines[-1]["sites"] == [0]
        log = (tmp_path / "server/server.log").read_text()
        assert "site 1 missed outer step" in log
        # Back, it takes the weights of the last outer step, at which the run is over.
        (tmp_path / "0" / "hf").rename(tmp_path / "hf of 0")
        codes, output = train_sites(inputs, tmp_path, [*settings, *reach], [(), ()])
        assert codes == [0, 0], output
        assert "jumping to step 60, where the other sites are" in output
        assert_same_weights(tmp_path)


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again_loses_nothing(
    inputs: Inputs, tmp_path: Path
) -> None:
    """The same weights as with a server that ran through. It is killed after every fourth round."""
    exports = []
    for name, dies in (("through", False), ("restarted", True)):
        directory, port = tmp_path / name, free_port()
        directory.mkdir()
        with outer_server(directory / "server", port=port) as settings:
            settings += ["engine.deepspeed_config=zero1", "sites.codec=int8", "train.steps=80"]
            settings += ["sites.timeout_seconds=280"]  # no site is to go on without the server
            done: list[tuple[list[int], str]] = []
            run = partial(train_sites, inputs, directory, settings, [(), ()])
            thread = threading.Thread(target=lambda run=run, done=done: done.append(run()))
            thread.start()
            if not dies:
                thread.join()
        while thread.is_alive():
            rounds = _num_rounds(directory)
            process = start_server(directory / "server", port)
            while thread.is_alive() and _num_rounds(directory) < rounds + 4:
                thread.join(0.05)
            process.kill()
            process.wait(20)
        codes, output = done[0]
        assert codes == [0, 0], output
        assert_same_weights(directory)
        assert [line["sites"] for line in outer_lines(directory / "0")] == [[0, 1]] * 20
        exports.append(load_file(directory / "0" / "hf" / "model.safetensors"))
    for key, weight in exports[0].items():
        assert torch.equal(weight, exports[1][key]), key


def _num_rounds(directory: Path) -> int:
    """Count the rounds that site 0 has logged."""
    metrics = directory / "0" / "metrics.jsonl"
    return metrics.read_text().count('"outer_step"') if metrics.exists() else 0


DIES = """
import os, sys
from bigtrain.cli import main
from bigtrain.sites.server.deliveries import ServerExchange
ServerExchange._uploaded = lambda *_: os._exit(9)
sys.exit(main(sys.argv[1:]))
"""
"""A server that is killed when it has all initial weights, before it confirms that."""


@pytest.mark.slow
def test_a_server_that_is_killed_with_the_initial_weights_gets_them_again(
    inputs: Inputs, tmp_path: Path
) -> None:
    """Without another start of a site."""
    port, directory = free_port(), tmp_path / "server"
    first = start_server(directory, port, program=("-c", DIES))
    servers: list[subprocess.Popen[bytes]] = []

    def start_again() -> None:
        first.wait(300)
        servers.append(start_server(directory, port))

    starter = threading.Thread(target=start_again)
    starter.start()
    reach = [f"sites.server=http://127.0.0.1:{port}", f"sites.token_file={directory / 'token'}"]
    settings = ["engine.deepspeed_config=zero1", f"sites.inner_steps={INNER_STEPS}", *reach]
    try:
        codes, output = train_sites(inputs, tmp_path, settings, [(), ()])
    finally:
        first.kill()
        starter.join()
        servers[0].terminate()
        servers[0].wait(20)
    assert codes == [0, 0], output
    assert first.returncode == 9
    assert_same_weights(tmp_path)
    assert [line["sites"] for line in outer_lines(tmp_path / "0")] == [[0, 1]] * 3


@pytest.mark.slow
def test_a_wrong_token_and_a_server_that_is_not_there_are_named(
    inputs: Inputs, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("fedcba9876543210fedcba9876543210")
    with outer_server(tmp_path / "server") as settings:
        own = [[f"sites.token_file={wrong}"], [f"sites.server=http://127.0.0.1:{free_port()}"]]
        settings += ["sites.timeout_seconds=8"]
        codes, output = train_sites(inputs, tmp_path, settings, own)
    assert codes == [2, 2]
    assert "not of this server's token" in output or "not signed with sites.token_file" in output
    assert "did not answer in time (ConnectionRefusedError" in output
    assert checkpoints.list_steps(tmp_path / "0") == []


DIES_AT_THE_LAST = """
import os, sys
from bigtrain.cli import main
from bigtrain.sites.server.store import ServerDirectory
write_step = ServerDirectory.write_step
def write(self, record, *args, **more):
    os._exit(9) if record["number"] == 3 else write_step(self, record, *args, **more)
ServerDirectory.write_step = write
sys.exit(main(sys.argv[1:]))
"""
"""A server that is killed at the outer step after the last step, before it makes it."""


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["server", "direct"])
def test_sites_that_end_without_the_server_export_once_they_made_the_last_outer_step(
    exchange: str, inputs: Inputs, tmp_path: Path
) -> None:
    port, directory = free_port(), tmp_path / "server"
    options = ["--window-seconds", "2"]
    server = start_server(directory, port, *options, program=("-c", DIES_AT_THE_LAST))
    settings = ["engine.deepspeed_config=zero1", f"sites.inner_steps={INNER_STEPS}"]
    settings += [f"sites.exchange={exchange}", f"sites.server=http://127.0.0.1:{port}"]
    settings += [f"sites.token_file={directory / 'token'}", "sites.timeout_seconds=5"]
    codes, output = train_sites(inputs, tmp_path, settings, [(), ()])
    assert server.wait(20) == 9
    assert codes == [2, 2], output
    assert output.count("ended apart from the other sites, after outer step 2 (") == 2, output
    assert not [*tmp_path.glob("?/hf"), *tmp_path.glob("?/exported.json")]

    def start_again(site: int) -> tuple[list[int], str]:
        place = ["sites.count=2", f"sites.index={site}", f"output.directory={tmp_path / str(site)}"]
        return train_sites(inputs, tmp_path, settings, [place])

    with server_of_threads(directory, window_seconds=2.0, port=port):
        # Site 1 makes the outer step: alone, or the server has both deliveries on disk.
        codes, output = start_again(1)
        assert codes == [0], output
        codes, output = start_again(0)
    record = json.loads((tmp_path / "1" / "exported.json").read_text())
    made_by = [1] if exchange == "direct" else [0, 1]
    assert record == {"step": STEPS, "outer_step": 3, "sites": made_by}
    if exchange == "direct":  # nobody is there who could send it the weights
        assert codes == [2], output
        assert "the run ended with outer step 3, after its last step 12, on site 1, and" in output
        assert not (tmp_path / "0" / "hf").exists()
    else:
        assert codes == [0], output
        assert json.loads((tmp_path / "0" / "exported.json").read_text()) == record
        assert_same_weights(tmp_path)
