"""What `bigtrain launch torchrun` writes; tests/cluster/test_elastic.py runs it."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from bigtrain.cli import main as bigtrain
from bigtrain.launchers.rendezvous_server import serve
from tests.support.cluster import wait_until
from tests.support.lives import shared_server
from tests.support.worlds import ROOT, free_port

RUN = ["launch", "torchrun", "--config", "quickstart", "--gpus-per-node", "2"]
MEET = ["--rendezvous", "login:29400"]


def test_script_for_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "quick.sh"
    options = ["--nodes", "1:2", "--setup", "module load cuda"]
    words = [*RUN, *MEET, *options, "--output", str(output), "batch.micro_batch_size=1", "seed=1"]
    assert bigtrain(words) == 0
    assert f"on every node with  bash {output}" in capsys.readouterr().out
    text = output.read_text()
    assert "--nnodes=1:2 --nproc-per-node=2 --max-restarts=100" in text
    assert "--rdzv-id=quickstart" in text
    assert "last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=4" in text
    assert "read_timeout=30,spares=0 " in text
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in text
    assert re.search(r'OMP_NUM_THREADS="\$\{OMP_NUM_THREADS:-\d+\}"', text)
    assert 'setpriv --pdeathsig KILL "$python"' in text
    assert text.index("module load cuda") < text.index("fail()")
    assert "arguments=(quickstart batch.micro_batch_size=1 seed=1)" in text
    if shutil.which("shellcheck") is not None:
        subprocess.run(["shellcheck", "--severity=warning", output], check=True)


@pytest.mark.parametrize(
    ("gpus", "ranks", "forks"),
    [(0, "auto", True), (2, "auto", False), (2, "forked", True), (0, "new", False)],
)
def test_ranks_are_forked_without_gpus_or_if_asked(
    gpus: int, ranks: str, forks: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "torchrun", "--config", "quickstart", "--dry-run", "--nodes", "1", *MEET]
    words += ["--gpus-per-node", str(gpus), "--ranks", ranks, "batch.micro_batch_size=1"]
    assert bigtrain([*words, *([] if gpus else ["--processes-per-node", "2"])]) == 0
    text = capsys.readouterr().out
    assert ("bigtrain.launchers.agent --fork bigtrain.forked_rank" in text) is forks
    assert ('--no-python setpriv --pdeathsig KILL "$python" -u' in text) is not forks
    assert text.rstrip().endswith('"$checkout/bigtrain/train.py" --config "${arguments[@]}"')


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rendezvous", "login"], "--rendezvous = 'login': is not HOST:PORT"),
        (["--rendezvous", "login:70000"], "is not HOST:PORT -> write node-1:29400"),
        ([*MEET, "--nodes", "4-1"], "--nodes = '4-1': is not a number of nodes"),
        ([*MEET, "--name", "a b"], "--name = 'a b': may contain only letters"),
        ([*MEET, "--spares", "-1"], "--spares = -1: is negative -> --spares 0"),
        (
            [*MEET, "--heartbeat-timeout", "2"],
            "--heartbeat-timeout = 2: is too short for 3 heartbeats of each node, of 1 -> "
            "--heartbeat-timeout 3",
        ),
        (
            [*MEET, "--nodes", "9000", "--spares", "1000"],
            "--heartbeat-timeout = 4: is too short for 3 heartbeats of each node, of 10000 -> "
            "--heartbeat-timeout 6",
        ),
        ([*MEET, "--setup", "if ["], "bash cannot parse the script"),
        # 8 samples, micro-batches of 4, 2 processes a node.
        (
            [*MEET, "--nodes", "1-2"],
            "is divisible for 1 nodes, not for 2 -> batch.global_batch_size: 16",
        ),
        ([*MEET, "--nodes", "1-64"], "not for 2, 3, 4, 5, 6, 7, 8, 9, ... -> --nodes 1"),
    ],
)
def test_what_cannot_work_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "job.sh"
    assert bigtrain([*RUN, "--output", str(output), *words]) == 2
    assert said in capsys.readouterr().err
    assert not output.exists()


def test_batch_in_tokens_is_told_in_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = [
        "batch.global_batch_size=null",
        "batch.global_tokens=2048",
        "batch.micro_batch_size=1",
    ]
    assert bigtrain([*RUN, *MEET, "--nodes", "1-3", "--dry-run", *tokens]) == 2
    assert "for 1, 2 nodes, not for 3 -> batch.global_tokens: 3072 is divisible for all" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["{here}"], "{here}"),
        (["login.invalid"], None),
        (["login.invalid", "127.0.0.1"], "127.0.0.1"),
    ],
)
def test_the_rendezvous_listens_at_one_address(words: list[str], address: str | None) -> None:
    """Of HOST, or the one that is named; on all where nodes could not reach HOST's."""
    addresses = [a.address for cards in psutil.net_if_addrs().values() for a in cards]
    here = next((a for a in addresses if re.fullmatch(r"(?!127\.)\d+(\.\d+){3}", a)), None)
    if here is None:
        pytest.skip("this machine has no address but the loopback's")
    port, forks = free_port(), shared_server()
    host, *rest = (word.format(here=here) for word in words)
    script = ["-m", "bigtrain.launchers.rendezvous_server", f"{host}:{port}", *rest]
    lives: list[tuple[list[int], str]] = []
    live = partial(forks.live, [], script=script, world_size=1)
    thread = threading.Thread(target=lambda: lives.append(live()))
    thread.start()
    at: list[tuple[psutil.Process, str]] = []

    def listens() -> bool:
        for process in psutil.Process(forks.process.pid).children():
            for one in process.net_connections(kind="inet"):
                if one.status == psutil.CONN_LISTEN and one.laddr.port == port:
                    at.append((process, one.laddr.ip))
        return bool(at)

    try:
        wait_until("the rendezvous listens", listens, 100)
        TCPStore(rest[0] if rest else here, port, wait_for_workers=False).set("a", "b")
    finally:
        for process, _ in at:
            process.terminate()
        thread.join()
    [(_, said)] = lives
    wanted = address and address.format(here=here)
    assert {ip for _, ip in at} == ({wanted} if wanted else {"::"})
    assert f"serving on port {port} of " in said
    assert (f", {wanted}\n" if wanted else ", every address\n") in said
    assert ("so every address is served -> close those" in said) == (wanted is None)


def test_serving_at_an_address_of_another_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("login", free_port(), "198.51.100.7") == 2
    assert "198.51.100.7 is not an address of this machine" in capsys.readouterr().err


def test_serving_at_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as holder:
        port = holder.getsockname()[1]
        assert serve("login", port) == 2
    said = f"rendezvous: port {port} of {socket.gethostname()} cannot be used"
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_node_that_joins_after_the_end_is_told_so() -> None:
    """And the first one ended with the exit code of its process."""
    port = str(free_port())
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=quick"]
    launch = [sys.executable, "-m", "bigtrain.launchers.agent", "--nnodes=1:2", *meet]
    conf = ["--rdzv-conf=last_call_timeout=1", "--no-python", "sh", "-c", "exit 7"]
    serve = [sys.executable, "-m", "bigtrain.launchers.rendezvous_server", port]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        assert "serving on port" in server.stdout.readline()
        ended = [
            subprocess.run([*launch, *conf], capture_output=True, text=True, cwd=ROOT, check=False)
            for _ in range(2)
        ]
        server.terminate()
    assert [one.returncode for one in ended] == [7, 2]
    assert "torchrun: rank 0 failed first, with exit code 7" in ended[0].stderr
    assert (
        f"the launch quick at the rendezvous 127.0.0.1:{port} has ended, so this node"
        in ended[1].stderr
    )
    assert "Traceback" not in ended[0].stderr + ended[1].stderr
