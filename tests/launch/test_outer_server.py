"""Sites that train by train.py and meet at `bigtrain outer-server`; both may be killed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
def test_sites_that_end_without_the_server_export_once_they_made_the_last_outer_step(
    inputs: Inputs, tmp_path: Path
) -> None:
    port, directory = free_port(), tmp_path / "server"
    options = ["--window-seconds", "2"]
    server = start_server(directory, port, *options, program=("-c", DIES_AT_THE_LAST))
    settings = ["engine.deepspeed_config=zero1", f"sites.inner_steps={INNER_STEPS}"]
    settings += ["sites.exchange=direct", f"sites.server=http://127.0.0.1:{port}"]
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
        codes, output = start_again(1)
        assert codes == [0], output
        codes, output = start_again(0)
    record = json.loads((tmp_path / "1" / "exported.json").read_text())
    assert record == {"step": STEPS, "outer_step": 3, "sites": [1]}
    # Nobody is there who could send it the weights.
    assert codes == [2], output
    assert "the run ended with outer step 3, after its last step 12, on site 1, and" in output
    assert not (tmp_path / "0" / "hf").exists()
