"""`bigtrain launch`: write the script or the manifests that start a run on a cluster."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from bigtrain.commands.arguments import Config, DeepSpeedConfig, Overrides
from bigtrain.errors import ConfigError, LaunchError, ModelError
from bigtrain.system.arguments import Argument, File, Positive
from bigtrain.system.files import write_new
from bigtrain.system.next_commands import next_lines

Ranks = Annotated[
    Literal["auto", "forked", "new"],
    Argument(
        help="forked: from one process of each node that has imported their libraries, so that a "
        "restart imports nothing; new: as new processes; auto: forked without GPUs (default: auto)"
    ),
]


Setup = Annotated[
    tuple[str, ...],
    "COMMAND",
    Argument(help="shell command that runs first, such as 'module load cuda'; may be repeated"),
]


@dataclass(frozen=True, kw_only=True)
class LaunchArguments:
    """Command line of every launcher."""

    summary: ClassVar[str]
    suffix: ClassVar[str]
    """of the file"""
    start: ClassVar[str]
    """how to start the file"""

    config: Config
    deepspeed_config: DeepSpeedConfig = None
    gpus_per_node: Annotated[int, "N"] = 8
    """0 to train on CPUs (default: 8)"""
    processes_per_node: Positive | None = None
    """on CPUs: ranks on each node (default: 1)"""
    output: File | None = None
    """file to write"""
    dry_run: bool = False
    """print instead of writing"""
    overrides: Overrides = ()

    @abstractmethod
    def text(self, output: Path) -> str:
        """Return the text of the file that will be written to `output`."""

    def processes_of_node(self) -> int:
        """Return the ranks of one node. Raises LaunchError if they contradict its GPUs."""
        gpus, processes = self.gpus_per_node, self.processes_per_node
        if gpus < 0:
            raise LaunchError(f"--gpus-per-node = {gpus}: must be 0 (CPUs) or more")
        if gpus and processes not in (None, gpus):
            raise LaunchError(
                f"--processes-per-node = {processes} contradicts --gpus-per-node = {gpus}: a GPU "
                "has one process -> remove it, or --gpus-per-node 0"
            )
        return gpus or processes or 1

    def run_name(self) -> str:
        """Return a name that Kubernetes and torchrun accept, from the run's file or recipe."""
        return re.sub(r"[^a-z0-9-]+", "-", Path(self.config).stem.lower()).strip("-")


@dataclass(frozen=True, kw_only=True)
class ScriptArguments(LaunchArguments):
    """Command line of launchers whose script runs in this directory."""

    nodes: Annotated[str, "N[-M]"] = "1"
    """nodes, or fewest and most (default: 1)"""

    def nodes_request(self, setup: tuple[str, ...]) -> dict[str, Any]:
        """Return the fields of `NodesRequest` except the nodes. Paths are absolute, since a job may
        start in another directory; names of recipes are unchanged."""

        def absolute(name_or_path: str) -> str:
            path = Path(name_or_path)
            return str(path.resolve()) if path.is_file() else name_or_path

        return {
            "config": absolute(self.config),
            "overrides": self.overrides,
            "processes_per_node": self.processes_of_node(),
            "directory": str(Path.cwd()),
            "deepspeed_config": self.deepspeed_config and absolute(self.deepspeed_config),
            "gpus": self.gpus_per_node > 0,
            "setup": setup,
        }


@dataclass(frozen=True, kw_only=True)
class SlurmArguments(ScriptArguments):
    """Command line of `bigtrain launch slurm`."""

    summary = "a script for sbatch"
    suffix = ".sbatch"
    start = "start it with  sbatch"

    time: str = "24:00:00"
    """time limit (default: 24:00:00)"""
    save_seconds: Annotated[Positive, "S"] = 600
    """seconds before the time limit at which the run is saved and requeued (default: 600)"""
    sbatch: Annotated[tuple[str, ...], "OPTION=VALUE"] = ()
    """additional option of sbatch, such as partition=gpu; may be repeated"""
    spares: Annotated[int | None, "N"] = None
    """nodes beyond --nodes that wait idle; one replaces a lost node within the job, and ranks that
    fail restart within it (default: the job is requeued instead)"""
    ranks: Ranks = "auto"
    setup: Setup = ()

    def text(self, output: Path) -> str:
        """Return the script, checked by bash."""
        from bigtrain.launchers.slurm import SlurmRequest, render_script, sbatch_options

        request = SlurmRequest(
            **self.nodes_request(self.setup),
            nodes=self.nodes,
            time=self.time,
            save_seconds=self.save_seconds,
            options=sbatch_options(self.sbatch),
            spares=self.spares,
            ranks=self.ranks,
        )
        return _checked(render_script(request))


@dataclass(frozen=True, kw_only=True)
class TorchrunArguments(ScriptArguments):
    """Command line of `bigtrain launch torchrun`."""

    summary = "an elastic run without a scheduler"
    suffix = ".torchrun.sh"
    start = "start it on every node with  bash"

    rendezvous: Annotated[str, "HOST:PORT"]
    """rendezvous endpoint: a permanent node, or a machine that runs the script with `serve`"""
    name: str | None = None
    """name of the run (default: from the run's file name)"""
    restarts: Positive = 100
    """restarts after failures, each from the newest checkpoint (default: 100)"""
    heartbeat_timeout: Annotated[Positive, "S"] = 4
    """seconds without a heartbeat after which a node counts as dead (default: 4)"""
    last_call_timeout: Annotated[Positive, "S"] = 15
    """at the first start, seconds in which more nodes may join (default: 15)"""
    spares: Annotated[int, "N"] = 0
    """nodes beyond the range that wait idle; one takes the place of a lost node (default: 0)"""
    threads: Positive = 1
    """OMP_NUM_THREADS (default: 1)"""
    ranks: Ranks = "auto"
    setup: Setup = ()

    def text(self, output: Path) -> str:
        """Return the script that will be written to `output`, checked by bash."""
        from bigtrain.launchers.torchrun import TorchrunRequest, render_torchrun

        request = TorchrunRequest(
            name=self.name or self.run_name(),
            **self.nodes_request(self.setup),
            nodes=self.nodes.replace(":", "-"),  # torchrun writes N:M
            endpoint=self.rendezvous,
            python=sys.executable,
            file=output.name,
            restarts=self.restarts,
            heartbeat_timeout=self.heartbeat_timeout,
            spares=self.spares,
            last_call_timeout=self.last_call_timeout,
            threads=self.threads,
            ranks=self.ranks,
        )
        return _checked(render_torchrun(request))


def _checked(text: str) -> str:
    """Check that bash can parse a script, and return it. Raises LaunchError."""
    checked = subprocess.run(
        ["bash", "-n"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    if checked.returncode != 0:
        raise LaunchError(f"bash cannot parse the script, check --setup: {checked.stderr.strip()}")
    return text


@dataclass(frozen=True, kw_only=True)
class KubernetesArguments(LaunchArguments):
    """Command line of `bigtrain launch kubernetes`."""

    summary = "manifests for kubectl"
    suffix = ".kubernetes.yaml"
    start = "start it with  kubectl apply -f"

    nodes: Positive = 1
    """default: 1"""
    image: str
    """container image, made from Dockerfile"""
    claim: Annotated[str, "NAME"]
    """PersistentVolumeClaim that all nodes can write (ReadWriteMany): data and run"""
    mount: Annotated[str, "PATH"] = "/data"
    """mount path in the pods (default: /data)"""
    name: str | None = None
    """name of the job (default: from the run's file name)"""
    namespace: str | None = None
    """default: kubectl's"""
    cpus: Positive | None = None
    """cores of each node"""
    memory: Annotated[str | None, "SIZE"] = None
    """memory of each node, such as 400Gi"""
    shared_memory: Annotated[str | None, "SIZE"] = None
    """size of /dev/shm (default: 16Gi, and what checkpoints in memory take)"""
    spares: Annotated[int | None, "N"] = None
    """pods beyond --nodes that wait idle; one replaces a lost pod while the others stay, and ranks
    that fail restart in their pods (default: all pods start again instead)"""
    ranks: Ranks = "auto"
    restarts: Annotated[int, "N"] = 10
    """restarts after failures, each from the newest checkpoint (default: 10)"""
    hang_minutes: Positive = 60
    """minutes without a line of log or metrics after which a pod counts as hung; must be more than
    the time of saving and of logging.every_steps steps (default: 60)"""
    save_seconds: Annotated[Positive, "S"] = 600
    """seconds for an evicted pod to save the run (default: 600)"""
    env: Annotated[tuple[str, ...], "NAME=VALUE"] = ()
    """variable of every pod; may be repeated"""
    secret_env: Annotated[tuple[str, ...], "NAME=SECRET:KEY"] = ()
    """variable from a key of a Secret; may be repeated"""
    env_from_secret: Annotated[tuple[str, ...], "SECRET"] = ()
    """every key of a Secret as a variable; may be repeated"""
    node_selector: Annotated[tuple[str, ...], "LABEL=VALUE"] = ()
    """label that nodes must have; may be repeated"""
    toleration: Annotated[tuple[str, ...], "KEY[=VALUE][:EFFECT]"] = ()
    """taint of nodes that pods tolerate; may be repeated"""
    image_pull_secret: Annotated[tuple[str, ...], "SECRET"] = ()
    """Secret for the image's registry; may be repeated"""
    rdma: Annotated[tuple[str, ...], "RESOURCE=N"] = ()
    """network cards of each node, such as rdma/hca=8; may be repeated"""
    token_secret: Annotated[str | None, "NAME"] = None
    """short for --secret-env HF_TOKEN=NAME:HF_TOKEN"""
    queue: Annotated[str | None, "NAME"] = None
    """LocalQueue of Kueue"""
    priority_class: Annotated[str | None, "NAME"] = None
    """PriorityClass of the pods"""
    fs_group: Annotated[int, "GID"] = 1000
    """group that may write the volume (default: 1000, the image's)"""
    patch: File | None = None
    """YAML with metadata and spec that is merged into the pods' template, for fields without an
    option; named entries of lists are merged by name, and null removes a field"""

    def text(self, output: Path) -> str:
        """Return the manifests."""
        from bigtrain.launchers.kubernetes import (
            KubernetesRequest,
            PodSettings,
            pairs,
            read_patch,
            render_manifests,
        )

        processes_per_node = self.processes_of_node()
        token = [f"HF_TOKEN={self.token_secret}:HF_TOKEN"] if self.token_secret else []
        return render_manifests(
            KubernetesRequest(
                name=self.name or self.run_name(),
                config=self.config,
                overrides=self.overrides,
                nodes=self.nodes,
                gpus=self.gpus_per_node,
                processes_per_node=processes_per_node,
                image=self.image,
                claim=self.claim,
                mount=self.mount,
                deepspeed_config=self.deepspeed_config,
                namespace=self.namespace,
                cpus=self.cpus,
                memory=self.memory,
                shared_memory=self.shared_memory,
                memory_checkpoint_bytes=self._memory_checkpoint_bytes(),
                spares=self.spares,
                ranks=self.ranks,
                restarts=self.restarts,
                hang_minutes=self.hang_minutes,
                save_seconds=self.save_seconds,
                rdma=pairs("--rdma", self.rdma),
                queue=self.queue,
                pod=PodSettings(
                    variables=pairs("--env", self.env),
                    secrets=pairs("--secret-env", [*self.secret_env, *token]),
                    whole_secrets=self.env_from_secret,
                    node_selector=pairs("--node-selector", self.node_selector),
                    tolerations=self.toleration,
                    image_pull_secrets=self.image_pull_secret,
                    priority_class=self.priority_class,
                    fs_group=self.fs_group,
                    patch=read_patch(self.patch),
                ),
            )
        )

    def _memory_checkpoint_bytes(self) -> float | None:
        """Return the bytes of a node's /dev/shm that checkpoints in memory need, as predicted by
        `bigtrain check`; None if the model's costs are unknown. Raises ConfigError for the run's
        own files."""
        from bigtrain.python_api.planning import predicted_run
        from bigtrain.settings.resolve import largest_phase, resolve_run_files

        processes = self.processes_of_node()
        resolved = resolve_run_files(
            self.config,
            self.overrides,
            self.nodes * processes,
            self.deepspeed_config,
            "cuda" if self.gpus_per_node else "cpu",
        )
        if resolved.config.checkpoint.memory is None:
            return 0.0
        try:
            predicted, _ = predicted_run(largest_phase(resolved), device=None)
        except (ConfigError, ModelError):
            return None
        assert predicted.memory_checkpoints is not None
        return predicted.memory_checkpoints.directory_bytes * processes


def run(args: LaunchArguments) -> int:
    """Write (or print) the file. Raises ConfigError and LaunchError; then nothing is written."""
    output = args.output or Path(f"{Path(args.config).stem}{args.suffix}")
    text = args.text(output)
    if args.dry_run:
        print(text, end="")
        return 0
    write_new(output, text)
    print(f"wrote {output}")
    print(next_lines(f"{args.start} {shlex.quote(str(output))}"))
    return 0


KINDS = {
    "slurm": SlurmArguments,
    "torchrun": TorchrunArguments,
    "kubernetes": KubernetesArguments,
}
