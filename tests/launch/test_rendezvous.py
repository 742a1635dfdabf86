"""Agents of several hosts (here: of one machine) at bigtrain's rendezvous, with ranks that wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from bigtrain.errors import EXIT_FAULTY_HOST, EXIT_STOPPED
from tests.support.cluster import wait_until
from tests.support.lives import shared_server
from tests.support.worlds import ROOT, free_port

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

# Appends its rank, the world's size and its host's name, and ends with the code that it finds.
WORKER = """
import os, pathlib, signal, sys, time
here, name = pathlib.Path(sys.argv[1]), sys.argv[2]
with open(here / "started", "a") as file:
    file.write(f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']} at {name}\\n")
asked = here / f"asked-{name}"
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(asked.read_text()) if asked.exists() else 75))
while not (here / f"go-{name}").exists():
    time.sleep(0.02)
code = (here / f"go-{name}").read_text()
(here / f"go-{name}").unlink()
sys.exit(int(code))
"""


class Hosts:
    """A rendezvous, and the agents that have been started at it, by the names of their hosts."""

    def __init__(self, folder: Path, nodes: str, spares: int, join_timeout: int = 600) -> None:
        self.folder, self.nodes = folder, nodes
        (folder / "worker.py").write_text(WORKER)
        (folder / "started").touch()
        self.port = free_port()
        self.settings = (
            f"keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,spares={spares},"
            f"is_host=0,join_timeout={join_timeout}"
        )
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def serve(self) -> None:
        serve = [sys.executable, "-m", "bigtrain.launchers.rendezvous_server", str(self.port)]
        self.server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.server.stdout is not None
        self.output = self.server.stdout
        assert "serving on port" in self.output.readline()

    def command(self, name: str) -> list[str]:
        """Return the command of a host's agent."""
        command = [sys.executable, "-m", "bigtrain.launchers.agent", f"--nnodes={self.nodes}"]
        command += ["--rdzv-backend=bigtrain", f"--rdzv-endpoint=127.0.0.1:{self.port}"]
        command += ["--rdzv-id=test", f"--rdzv-conf={self.settings}", "--max-restarts=9"]
        command += ["--monitor-interval=0.1", "--nproc-per-node=1", "--no-python", "setpriv"]
        command += ["--pdeathsig", "KILL", sys.executable, str(self.folder / "worker.py")]
        return [*command, str(self.folder), name]

    def start(self, name: str, **variables: str) -> None:
        with (self.folder / f"{name}.log").open("w") as log:
            self.agents[name] = subprocess.Popen(
                self.command(name), stdout=log, stderr=log, cwd=ROOT,
                env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **variables},
            )  # fmt: skip

    def started(self) -> list[str]:
        """Return a line for each rank that has been started, in no order within a round."""
        return (self.folder / "started").read_text().splitlines()

    def wait_for(self, *lines: str) -> None:
        """Wait until the newest ranks are those of `lines`."""

        def are_there() -> bool:
            return sorted(self.started()[-len(lines) :]) == sorted(lines)

        wait_until(f"{lines}, not {self.started()}", are_there, 100)

    def result(self) -> int:
        """End the server of the rendezvous; return its exit code, the result of the run."""
        self.server.send_signal(signal.SIGUSR2)
        return self.server.wait(100)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def end(self, name: str, code: int) -> None:
        """Let the rank of a host end with `code`."""
        (self.folder / "new").write_text(str(code))
        (self.folder / "new").rename(self.folder / f"go-{name}")


@contextmanager
def ended(made: Hosts) -> Iterator[Hosts]:
    """Kill what is left of the agents and the rendezvous, and show what they wrote."""
    made.serve()
    yield made
    for agent in [*made.agents.values(), made.server]:
        for process in psutil.Process(agent.pid).children() if agent.poll() is None else []:
            process.kill()
        agent.kill()
        agent.wait()
    made.output.close()
    for name in made.agents:  # shown where the test has failed
        print(f"== {name}\n{made.log(name)}")


@pytest.fixture
def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with ended(Hosts(tmp_path, *request.param)) as made:
        yield made


# One of the names, whose command its process becomes without starting Python again.
FORKED = """
import json, os, pathlib, runpy, sys
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
name, sys.argv = json.loads(sys.argv[2])[rank]
log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT)
os.dup2(log, 1), os.dup2(log, 2)
(folder / f"new-{name}").write_text(str(os.getpid()))
(folder / f"new-{name}").rename(folder / f"pid-{name}")
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_spare_continues_without_the_lost_host(tmp_path: Path) -> None:
    """With forked agents and a forked rendezvous, which have nothing to import."""
    hosts = Hosts(tmp_path, "1", 1)
    server = ["bigtrain.launchers.rendezvous_server", str(hosts.port)]
    commands = {"a": hosts.command("a")[2:], "b": hosts.command("b")[2:], "server": server}
    (tmp_path / "forked.py").write_text(FORKED)
    script = [str(tmp_path / "forked.py"), str(tmp_path), json.dumps([*commands.items()])]
    with ThreadPoolExecutor(1) as thread:
        life = thread.submit(
            *(shared_server().live, []),
            **{"world_size": 3, "script": script, "limit_seconds": 200.0, "grace_seconds": 150.0},
            environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )

        def process(name: str) -> psutil.Process:
            return psutil.Process(int((tmp_path / f"pid-{name}").read_text()))

        wait_until("one trains", lambda: len(hosts.started()) == 1, 100)
        lost = hosts.started()[0][-1]
        spare = "ab".replace(lost, "")
        wait_until("the other is a spare", lambda: "this one is a spare" in hosts.log(spare), 100)
        process(lost).send_signal(signal.SIGKILL)
        hosts.wait_for(f"0 of 1 at {spare}")
        hosts.end(spare, 0)
        process(spare).wait(100)
        process("server").send_signal(signal.SIGUSR2)
        codes, _ = life.result()
    expected = {lost: -signal.SIGKILL, spare: 0, "server": 0}
    assert dict(zip(commands, codes, strict=True)) == expected, hosts.log(spare)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [("2", 1)], indirect=True)
def test_a_spare_gets_the_rank_of_the_lost_host(hosts: Hosts) -> None:
    for name in ("a", "b"):
        hosts.start(name)
    wait_until("both train", lambda: len(hosts.started()) == 2, 100)
    lost = next(line[-1] for line in hosts.started() if line.startswith("0"))
    stays = "ab".replace(lost, "")
    spare = "c"
    hosts.start(spare)
    wait_until("c is a spare", lambda: "this one is a spare" in hosts.log(spare), 100)
    assert "all 2 nodes of the run are there: this one is a spare" in hosts.log(spare)
    hosts.start("d")  # for which there is no place
    assert hosts.agents["d"].wait(100) == 2
    assert "the run has all of its 2 nodes and 1 spares -> " in hosts.log("d")
    assert "Traceback" not in hosts.log("d")

    hosts.agents[lost].send_signal(signal.SIGKILL)
    hosts.wait_for(f"0 of 2 at {spare}", f"1 of 2 at {stays}")
    assert ": lost, the other nodes continue" in hosts.log(stays)

    # A rank that fails restarts all; each host keeps its rank.
    hosts.end(stays, 3)
    wait_until("a new round", lambda: len(hosts.started()) == 6, 100)
    hosts.wait_for(f"0 of 2 at {spare}", f"1 of 2 at {stays}")
    assert "rank 1 has ended with exit code 3" in hosts.log(stays)

    hosts.start("e")
    wait_until("e is a spare", lambda: "this one is a spare" in hosts.log("e"), 100)
    for name in (spare, stays):
        hosts.end(name, 0)
    for name in (spare, stays, "e"):  # a spare ends with the run
        assert hosts.agents[name].wait(100) == 0, hosts.log(name)
    assert "Traceback" not in hosts.log("e")

    hosts.start("f")  # as a pod that replaces one which was lost just before the end
    assert hosts.agents["f"].wait(100) == 0, hosts.log("f")
    assert len(hosts.started()) == 6
    assert hosts.result() == 0


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [("1:3", 0)], indirect=True)
def test_the_run_continues_with_fewer_hosts_and_with_more(hosts: Hosts) -> None:
    for name in ("a", "b", "c"):
        hosts.start(name)
    wait_until("three train", lambda: sum(" of 3 " in each for each in hosts.started()) == 3, 100)
    ranks = {line[-1]: int(line[0]) for line in hosts.started()[-3:]}
    lost = next(name for name, rank in ranks.items() if rank == 1)
    first, last = sorted(set(ranks) - {lost}, key=lambda name: ranks[name])
    # Suspended, not dead: its connection stays open.
    hosts.agents[lost].send_signal(signal.SIGSTOP)
    hosts.wait_for(f"0 of 2 at {first}", f"1 of 2 at {last}")
    hosts.start("d")
    hosts.wait_for(f"0 of 3 at {first}", f"1 of 3 at {last}", "2 of 3 at d")


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [("1:3", 0)], indirect=True)
def test_a_host_that_computes_wrong_bits_leaves(hosts: Hosts) -> None:
    """Though a rank of another host fails first: all find it at the same time."""
    for name in ("a", "b", "c"):
        hosts.start(name)
    wait_until("three train", lambda: sum(" of 3 " in each for each in hosts.started()) == 3, 100)
    ranks = {line[-1]: int(line[0]) for line in hosts.started()[-3:]}
    first, faulty, last = sorted(ranks, key=lambda name: ranks[name])
    (hosts.folder / f"asked-{faulty}").write_text(str(EXIT_FAULTY_HOST))
    hosts.end(last, 2)
    assert hosts.agents[faulty].wait(100) == EXIT_FAULTY_HOST
    assert "this node computes wrong bits, so it leaves the run -> " in hosts.log(faulty)
    assert "Traceback" not in hosts.log(faulty)
    hosts.wait_for(f"0 of 2 at {first}", f"1 of 2 at {last}")
    for name in (first, last):
        hosts.end(name, 0)
    for name in (first, last):
        assert hosts.agents[name].wait(100) == 0, hosts.log(name)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [("2", 0, 3)], indirect=True)
def test_a_run_with_too_few_hosts_ends_and_is_to_be_started_again(hosts: Hosts) -> None:
    hosts.start("a")
    assert hosts.agents["a"].wait(100) == EXIT_STOPPED, hosts.log("a")
    assert "fewer nodes joined than the run needs" in hosts.log("a")
    assert "Traceback" not in hosts.log("a")
    assert hosts.result() == EXIT_STOPPED


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [("1", 1)], indirect=True)
def test_ranks_that_stopped_restart_unless_the_run_is_ending(hosts: Hosts) -> None:
    hosts.start("a")
    wait_until("a trains", lambda: len(hosts.started()) == 1, 100)
    hosts.end("a", EXIT_STOPPED)
    wait_until("it restarts", lambda: len(hosts.started()) == 2, 100)
    hosts.start("b")
    wait_until("b is a spare", lambda: "this one is a spare" in hosts.log("b"), 100)
    hosts.server.send_signal(signal.SIGUSR1)
    hosts.end("a", EXIT_STOPPED)
    assert hosts.agents["a"].wait(100) == EXIT_STOPPED, hosts.log("a")
    assert hosts.agents["b"].wait(100) == 0, hosts.log("b")
    assert len(hosts.started()) == 2
    assert hosts.result() == 1  # neither complete nor short of hosts
