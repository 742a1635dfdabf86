"""The Dockerfile's image, built and run; pods of `bigtrain launch kubernetes` in its containers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from bigtrain.cli import main as bigtrain
from bigtrain.errors import EXIT_STOPPED
from tests.launch.conftest import Inputs, metrics
from tests.support.cluster import wait_until
from tests.support.cluster.containers import (
    Image,
    Pods,
    bound,
    build_image,
    num_bytes,
    start,
    why_no_containers,
)
from tests.support.cluster.network import network, why_no_network
from tests.support.pages import page_text
from tests.support.worlds import ROOT

REASON = why_no_containers() or why_no_network()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]
STEPS, MEMORY = 60, "3Gi"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    built = build_image(tmp_path_factory.mktemp("image"))
    print(f"{built.size_bytes / 1e9:.2f} GB with its base")
    yield built
    built.remove()


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A folder that any group of a pod can be given."""
    for parent in (tmp_path.parent, tmp_path):
        parent.chmod(0o755)
    folder = tmp_path / "volume"
    folder.mkdir()
    return folder


def test_quickstart_ends_in_it(image: Image, volume: Path, tmp_path: Path) -> None:
    """As the image's user, with a read-only root."""
    volume.chmod(0o777)
    tools = bound(ROOT / "tools", "/opt/bigtrain/tools", read_only=True)
    command = ["python", "tools/quickstart.py", "/data/quickstart"]
    mounts = [bound(volume, "/data"), tools]
    container = start(image, tmp_path / "quickstart", command, mounts=mounts)
    code = container.wait(900)
    said = container.log.read_text()
    assert code == 0, said[-4000:]
    assert "def read(self, " in said
    assert (volume / "quickstart" / "run" / "hf" / "config.json").stat().st_uid == 1000


def write_run(inputs: Inputs, volume: Path, output: Path) -> None:
    """Copy the data of `inputs` to `volume`, and write a run that saves every five steps."""
    for source in (inputs.shards, inputs.tokenizer):
        for file in source.rglob("*"):
            if file.is_file():
                target = volume / source.name / file.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
    tree = yaml.safe_load(inputs.run_yaml.read_text())
    tree["train"] = {"steps": STEPS}
    tree["checkpoint"] = {"every_steps": 5}
    tree["data"] = {"path": f"/data/{inputs.shards.name}"}
    tree["output"]["directory"] = "/data/run"
    output.write_text(yaml.safe_dump(tree))


def test_a_platform_stops_and_starts_the_command_of_the_page(
    image: Image, inputs: Inputs, volume: Path, tmp_path: Path
) -> None:
    write_run(inputs, volume, volume / "run.yaml")
    for place in (volume, *volume.rglob("*")):
        os.chown(place, 1000, 1000)
    page = page_text("docs/howto/container.md")
    [line] = [line for line in page.splitlines() if line.startswith("python -m bigtrain")]
    mounts, run = [bound(volume, "/data")], volume / "run"
    stopped = start(image, tmp_path / "first", line.split(), mounts=mounts)
    wait_until("a checkpoint", lambda: list(run.glob("checkpoints/step-*/manifest.json")), 180)
    stopped.signal(signal.SIGTERM)
    assert stopped.wait(120) == EXIT_STOPPED, stopped.log.read_text()[-3000:]
    last = max(metrics(run))
    assert 0 < last < STEPS
    again = start(image, tmp_path / "second", line.split(), mounts=mounts)
    assert again.wait(300) == 0, again.log.read_text()[-3000:]
    assert sorted(metrics(run)) == list(range(1, STEPS + 1))
    assert f"resumed at step {last}" in (run / "log.txt").read_text()


def write_manifests(inputs: Inputs, volume: Path, folder: Path) -> str:
    """Manifests of two pods for the run of `inputs`, whose data is copied to `volume`."""
    run_yaml = folder / "run.yaml"
    write_run(inputs, volume, run_yaml)
    output = folder / "job.yaml"
    words = ["launch", "kubernetes", "--config", run_yaml, "--name", "tiny", "--nodes", "2"]
    words += ["--gpus-per-node", "0", "--image", "localhost/bigtrain", "--claim", "any"]
    words += ["--mount", "/data", "--cpus", "1", "--memory", MEMORY, "--shared-memory", "256Mi"]
    words += ["--save-seconds", "60", "--output", output]
    assert bigtrain([str(word) for word in words]) == 0
    return output.read_text()


def test_pods_are_evicted_and_killed_and_go_on(
    image: Image, inputs: Inputs, volume: Path, tmp_path: Path
) -> None:
    run = volume / "run"
    manifests = write_manifests(inputs, volume, tmp_path)
    with (
        network(["node-0", "node-1"]) as net,
        Pods(
            *(image, manifests, volume, tmp_path / "tiny"),
            [host.pid for host in net.hosts.values()],
            [net.address(name) for name in net.hosts],
        ) as pods,
    ):
        code, said = pods.check()
        assert (code, run.exists()) == (0, False), said

        _, second = pods.start()
        wait_until("a checkpoint", lambda: list(run.glob("checkpoints/step-*/manifest.json")), 180)
        if (limit := Path("/sys/fs/cgroup/memory", second.name, "memory.limit_in_bytes")).exists():
            assert int(limit.read_text()) == num_bytes(MEMORY)
        second.signal(signal.SIGTERM)  # an eviction
        codes = [pod.wait(pods.grace_seconds) for pod in pods.running]
        assert codes == [EXIT_STOPPED, EXIT_STOPPED], second.log.read_text()[-3000:]
        stopped = max(metrics(run))
        assert 0 < stopped < STEPS

        first, other = pods.start()
        wait_until("steps after it", lambda: max(metrics(run)) > stopped + 2, 180)
        first.signal(signal.SIGKILL)  # a node is lost
        assert first.wait(60) != 0
        other.signal(signal.SIGTERM)  # JobSet ends the others
        assert other.wait(pods.grace_seconds) != 0

        codes = [pod.wait(300) for pod in pods.start()]
        assert codes == [0, 0], [pod.log.read_text()[-2000:] for pod in pods.running]
    assert sorted(metrics(run)) == list(range(1, STEPS + 1))
    assert f"resumed at step {stopped}" in (run / "log.txt").read_text()
    assert run.stat().st_gid == pods.group


def test_a_run_that_is_invalid_ends_in_its_check(
    image: Image, inputs: Inputs, volume: Path, tmp_path: Path
) -> None:
    manifests = write_manifests(inputs, volume, tmp_path).replace("steps: 60", "steps: -1")
    with network(["node-0"]) as net:
        (process,) = (host.pid for host in net.hosts.values())
        pods = Pods(image, manifests, volume, tmp_path / "tiny", [process], [net.address("node-0")])
        code, said = pods.check()
    assert (code, "train.steps" in said) == (2, True), said
