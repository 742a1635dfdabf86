"""`bigtrain launch`: write the script or the manifests that start a run on a cluster."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigtrain.errors import ConfigError, LaunchError, ModelError
from bigtrain.system.files import write_new


def run(args: argparse.Namespace) -> int:
    """Write (or print) the file. Raises ConfigError and LaunchError; then nothing is written."""
    launcher = KINDS[args.kind]
    output = args.output or Path(f"{Path(args.config).stem}{launcher.suffix}")
    text = launcher.text_of(args, output)
    if args.dry_run:
        print(text, end="")
        return 0
    write_new(output, text)
    print(f"{output}: {launcher.start} {output}")
    return 0


def kubernetes_text(args: argparse.Namespace, output: Path) -> str:
    """Return the manifests for `args`. `output` is not read."""
    from bigtrain.launchers.kubernetes import (
        KubernetesRequest,
        PodSettings,
        pairs,
        read_patch,
        render_manifests,
    )

    gpus, processes = processes_of(args)
    token = [f"HF_TOKEN={args.token_secret}:HF_TOKEN"] if args.token_secret else []
    return render_manifests(
        KubernetesRequest(
            name=args.name or _name_of(args.config),
            config=args.config,
            overrides=tuple(args.overrides),
            nodes=args.nodes,
            gpus=gpus,
            processes_per_node=processes,
            image=args.image,
            claim=args.claim,
            mount=args.mount,
            deepspeed_config=args.deepspeed_config,
            namespace=args.namespace,
            cpus=args.cpus,
            memory=args.memory,
            shared_memory=args.shared_memory,
            memory_checkpoint_bytes=_memory_checkpoint_bytes(args, gpus, processes),
            spares=args.spares,
            ranks=args.ranks,
            restarts=args.restarts,
            hang_minutes=args.hang_minutes,
            save_seconds=args.save_seconds,
            rdma=pairs("--rdma", args.rdma),
            queue=args.queue,
            pod=PodSettings(
                variables=pairs("--env", args.env),
                secrets=pairs("--secret-env", [*args.secret_env, *token]),
                whole_secrets=tuple(args.env_from_secret),
                node_selector=pairs("--node-selector", args.node_selector),
                tolerations=tuple(args.toleration),
                image_pull_secrets=tuple(args.image_pull_secret),
                priority_class=args.priority_class,
                fs_group=args.fs_group,
                patch=read_patch(args.patch),
            ),
        )
    )


def _memory_checkpoint_bytes(args: argparse.Namespace, gpus: int, processes: int) -> float | None:
    """Return the bytes that checkpoints in memory take of a node's /dev/shm, as `bigtrain check`
    predicts them; None if they are unknown. Raises ConfigError."""
    from bigtrain.python_api.planning import predicted_run
    from bigtrain.settings.resolve import largest_phase, resolve_run_files

    resolved = resolve_run_files(
        args.config,
        args.overrides,
        args.nodes * processes,
        args.deepspeed_config,
        "cuda" if gpus else "cpu",
    )
    if resolved.config.checkpoint.memory is None:
        return 0.0
    try:
        predicted, _ = predicted_run(largest_phase(resolved), None)
    except (ConfigError, ModelError):
        return None
    assert predicted.memory_checkpoints is not None
    return predicted.memory_checkpoints.directory_bytes * processes


def _run_on_nodes(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `NodesRequest` but for the nodes."""
    gpus, processes = processes_of(args)
    return {
        "config": absolute(args.config),
        "overrides": tuple(args.overrides),
        "processes_per_node": processes,
        "directory": str(Path.cwd()),
        "deepspeed_config": args.deepspeed_config and absolute(args.deepspeed_config),
        "gpus": gpus > 0,
        "setup": tuple(args.setup),
    }


def slurm_text(args: argparse.Namespace, output: Path) -> str:
    """Return the script for `args`, checked by bash. `output` is not read."""
    from bigtrain.launchers.slurm import SlurmRequest, render_script, sbatch_options

    text = render_script(
        SlurmRequest(
            **_run_on_nodes(args),
            nodes=args.nodes,
            time=args.time,
            save_seconds=args.save_seconds,
            options=sbatch_options(args.sbatch),
            spares=args.spares,
            ranks=args.ranks,
        )
    )
    return _checked(text)


def torchrun_text(args: argparse.Namespace, output: Path) -> str:
    """Return the script for `args` that will be written to `output`, checked by bash."""
    from bigtrain.launchers.torchrun import TorchrunRequest, render_torchrun

    text = render_torchrun(
        TorchrunRequest(
            name=args.name or _name_of(args.config),
            **_run_on_nodes(args),
            nodes=args.nodes.replace(":", "-"),  # torchrun's own notation
            endpoint=args.rendezvous,
            python=sys.executable,
            file=output.name,
            restarts=args.restarts,
            heartbeat_timeout=args.heartbeat_timeout,
            spares=args.spares,
            last_call_timeout=args.last_call_timeout,
            threads=args.threads,
            ranks=args.ranks,
        )
    )
    return _checked(text)


def _checked(text: str) -> str:
    """Check that bash can parse a script, and return it. Raises LaunchError."""
    checked = subprocess.run(
        ["bash", "-n"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    if checked.returncode != 0:
        raise LaunchError(f"bash cannot parse the script, check --setup: {checked.stderr.strip()}")
    return text


def _name_of(config: str) -> str:
    """Return a name that Kubernetes and torchrun accept, from the run's file or recipe."""
    return re.sub(r"[^a-z0-9-]+", "-", Path(config).stem.lower()).strip("-")


def processes_of(args: argparse.Namespace) -> tuple[int, int]:
    """Return GPUs and ranks of one node. Raises LaunchError if the two contradict each other."""
    gpus, processes = args.gpus_per_node, args.processes_per_node
    if gpus < 0:
        raise LaunchError(f"--gpus-per-node = {gpus}: must be 0 (CPUs) or more")
    if gpus and processes not in (None, gpus):
        raise LaunchError(
            f"--processes-per-node = {processes} contradicts --gpus-per-node = {gpus}: a GPU has "
            "one process -> remove it, or --gpus-per-node 0"
        )
    return gpus, gpus or processes or 1


def absolute(name_or_path: str) -> str:
    """Return an absolute path, independent of the job's working directory; recipe names are
    unchanged."""
    path = Path(name_or_path)
    return str(path.resolve()) if path.is_file() else name_or_path


@dataclass(frozen=True)
class Kind:
    """Launcher that a file is written for. Its arguments are ``launch KIND`` in arguments.yaml.

    `start`: how to start the file; `text_of`: the file's text, of the arguments and its path.
    """

    summary: str
    suffix: str
    start: str
    text_of: Callable[[argparse.Namespace, Path], str]


KINDS = {
    "slurm": Kind("a script for sbatch", ".sbatch", "start it with  sbatch", slurm_text),
    "torchrun": Kind(
        "an elastic run without a scheduler",
        ".torchrun.sh",
        "start it on every node with  bash",
        torchrun_text,
    ),
    "kubernetes": Kind(
        "manifests for kubectl",
        ".kubernetes.yaml",
        "start it with  kubectl apply -f",
        kubernetes_text,
    ),
}
