"""Real hosts with sshd and Slurm, and a dataset that a run of seconds trains on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from bigtrain.cli import main as bigtrain
from tests.launch.conftest import (
    VOCAB_SIZE,
    Inputs,
    metrics,
    run_tree,
    tokenize,
    trained,
    write_documents,
)
from tests.support.cluster import Cluster, cluster, wait_until, why_not
from tests.support.worlds import ROOT

TRAIN = ROOT / "bigtrain" / "train.py"
# Compiled once per machine, not once per cluster: a host's home directory is empty.
EXTENSIONS = os.environ.get(
    "TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache" / "torch_extensions")
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs a cluster and starts several processes."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.distributed)


@dataclass(frozen=True)
class Lab:
    """A cluster, and a folder that all its hosts see, where a test's processes start."""

    cluster: Cluster
    folder: Path
    run_yaml: Path

    def run(self, host: str, *command: str | Path, **env: str) -> tuple[int, str]:
        """`Cluster.run` in the folder of this test."""
        return self.cluster.run(host, *command, cwd=self.folder, **COMMON, **env)


COMMON = {
    "PYTHONPATH": str(ROOT),
    "TORCH_EXTENSIONS_DIR": EXTENSIONS,
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "BIGTRAIN_CHECKOUT": str(ROOT),
}


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """n0 (login node and Slurm's controller), n1 and n2; skips where there can be none."""
    reason = why_not(slurm=True)
    if reason is not None:
        pytest.skip(reason)
    with cluster(tmp_path_factory.mktemp("cluster") / "state", 3, slurm=True) as running:
        yield running


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Text in several files, a tokenizer, shards, and a run YAML as tests/launch has it."""
    root = tmp_path_factory.mktemp("tiny")
    texts, tokenizer = root / "texts", root / "tokenizer"
    texts.mkdir()
    for number in range(4):
        write_documents(texts / f"{number}.jsonl", 20, seed=number)
    words = ["tokenizer", "--input", texts, "--vocab-size", VOCAB_SIZE, "--output", tokenizer]
    assert bigtrain(list(map(str, words))) == 0
    run_yaml = root / "run.yaml"
    tree = run_tree(tokenize(texts, tokenizer, root / "shards"), root / "run")
    tree["output"]["export"] = False
    tree["batch"]["global_batch_size"] = 12  # divides on one, two and three hosts
    run_yaml.write_text(yaml.safe_dump(tree))
    return Inputs(texts, tokenizer, root / "shards", run_yaml)


@pytest.fixture
def lab(hosts: Cluster, inputs: Inputs, tmp_path: Path) -> Iterator[Lab]:
    """The cluster for one test; nothing of it runs on afterwards."""
    run_yaml = tmp_path / "run.yaml"
    text = inputs.run_yaml.read_text()
    run_yaml.write_text(text.replace(str(inputs.run_yaml.parent / "run"), str(tmp_path / "run")))
    yield Lab(hosts, tmp_path, run_yaml)
    hosts.run("n0", "scancel", "--user=root", cwd=tmp_path)
    hosts.tidy()
    for host in hosts.hosts:  # what a launcher could not reach, or outlives it on another host
        for process in hosts.processes(host, str(TRAIN)):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                process.kill()


@pytest.fixture(scope="session")
def alone(inputs: Inputs) -> dict[int, float]:
    """The loss by step of one process on this machine."""
    root = inputs.run_yaml.parent
    trained("--config", inputs.run_yaml)
    return metrics(root / "run")


Submit = Callable[..., tuple[str, Path]]


@pytest.fixture
def nodes(lab: Lab) -> None:
    """Slurm's nodes are idle, whatever the test before has done to them.

    When a node is back that was cut off, Slurm may start what was cancelled there meanwhile, and
    drain the node because that runs already.
    """

    def idle() -> bool:
        lines = lab.run("n0", "sinfo", "-h", "-N", "-o", "%N %T")[1].splitlines()
        states = dict(line.split() for line in lines)
        if states == dict.fromkeys(
            list(lab.cluster.hosts)[1:], "idle"
        ):  # one that does not answer is "idle*"
            return True
        lab.run("n0", "scancel", "--user=root")
        for name, state in states.items():
            if state.startswith("drain"):
                lab.run("n0", "scontrol", "update", f"nodename={name}", "state=resume")
        return False

    wait_until("Slurm's nodes are idle", idle, 150)


@pytest.fixture
def submit(lab: Lab, nodes: None) -> Submit:
    """``submit("slurm/train.sbatch", options, arguments)``: the job's number and its log."""

    def run(
        script: str | Path,
        options: list[str],
        arguments: list[str | Path],
        name: str = "job.log",
    ) -> tuple[str, Path]:
        log = lab.folder / name
        command = ["sbatch", "--parsable", f"--output={log}", *options, script, *arguments]
        code, output = lab.run("n0", *command)
        assert code == 0, output
        return output.strip(), log

    return run
