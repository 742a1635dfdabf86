"""`bigtrain launch`: write the script or the manifests that start a run on a cluster."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from bigtrain.commands.arguments import EXIT_CODES, add_count, add_overrides, positive_int
from bigtrain.commands.registry import CommandParser
from bigtrain.errors import LaunchError
from bigtrain.system.files import write_new

_KINDS = {
    "slurm": "a script for sbatch",
    "torchrun": "an elastic run without a scheduler",
    "kubernetes": "manifests for kubectl",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bigtrain launch slurm`, `torchrun` and `kubernetes`."""
    kinds = parser.add_subparsers(dest="kind", metavar="slurm|torchrun|kubernetes", required=True)
    parsers = {
        kind: kinds.add_parser(kind, help=text, description=f"Write {text}", epilog=EXIT_CODES)
        for kind, text in _KINDS.items()
    }
    if isinstance(parser, CommandParser):
        parser.commands.update(parsers)
    slurm = parsers["slurm"]
    _add_common(slurm)
    slurm.add_argument(
        "--nodes", default="1", metavar="N[-M]", help="nodes, or fewest and most (default: 1)"
    )
    slurm.add_argument("--time", default="24:00:00", help="time limit (default: 24:00:00)")
    add_count(
        slurm,
        "--save-seconds",
        600,
        "S",
        "seconds before the time limit at which the run is saved and requeued",
    )
    _add_repeated(
        slurm, "--sbatch", "OPTION=VALUE", "additional option of sbatch, such as partition=gpu"
    )
    _add_setup(slurm)
    _add_torchrun_arguments(parsers["torchrun"])
    _add_kubernetes_arguments(parsers["kubernetes"])


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="run YAML, or the name of a recipe")
    parser.add_argument(
        "--deepspeed_config",
        "--deepspeed-config",
        metavar="NAME_OR_PATH",
        help="DeepSpeed JSON or its name in ds_configs/ (default: engine.deepspeed_config)",
    )
    parser.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="0 to train on CPUs (default: 8)"
    )
    parser.add_argument(
        "--processes-per-node",
        type=positive_int,
        metavar="N",
        help="on CPUs: ranks on each node (default: 1)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write")
    parser.add_argument("--dry-run", action="store_true", help="print instead of writing")
    add_overrides(parser)


def _add_torchrun_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument(
        "--nodes", default="1", metavar="N[-M]", help="nodes, or fewest and most (default: 1)"
    )
    parser.add_argument(
        "--rendezvous",
        required=True,
        metavar="HOST:PORT",
        help="rendezvous endpoint: a permanent node, or a machine that runs the script with "
        "`serve`",
    )
    parser.add_argument("--name", help="name of the run (default: from the run's file name)")
    add_count(
        parser, "--restarts", 100, "N", "restarts after failures, each from the newest checkpoint"
    )
    add_count(
        parser,
        "--heartbeat-timeout",
        15,
        "S",
        "seconds without a heartbeat after which a node counts as dead",
    )
    add_count(
        parser,
        "--last-call-timeout",
        15,
        "S",
        "after a change, seconds in which more nodes may join",
    )
    add_count(parser, "--threads", 1, "N", "OMP_NUM_THREADS")
    _add_setup(parser)


def _add_setup(parser: argparse.ArgumentParser) -> None:
    text = "shell command that runs first, such as 'module load cuda'"
    _add_repeated(parser, "--setup", "COMMAND", text)


def _add_repeated(parser: argparse.ArgumentParser, flag: str, metavar: str, text: str) -> None:
    parser.add_argument(
        flag, action="append", default=[], metavar=metavar, help=f"{text}; may be repeated"
    )


def _add_kubernetes_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("--nodes", type=positive_int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--image", required=True, help="container image, made from Dockerfile")
    parser.add_argument(
        "--claim",
        required=True,
        metavar="NAME",
        help="PersistentVolumeClaim that all nodes can write (ReadWriteMany): data and run",
    )
    parser.add_argument(
        "--mount", default="/data", metavar="PATH", help="mount path in the pods (default: /data)"
    )
    parser.add_argument("--name", help="name of the job (default: from the run's file name)")
    parser.add_argument("--namespace", help="default: kubectl's")
    parser.add_argument("--cpus", type=positive_int, metavar="N", help="cores of each node")
    parser.add_argument("--memory", metavar="SIZE", help="memory of each node, such as 400Gi")
    parser.add_argument(
        "--shared-memory", default="16Gi", metavar="SIZE", help="size of /dev/shm (default: 16Gi)"
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=10,
        metavar="N",
        help="restarts after failures, each from the newest checkpoint (default: 10)",
    )
    add_count(
        parser,
        "--hang-minutes",
        60,
        "N",
        "minutes without a line of log or metrics after which a pod counts as hung; must be more "
        "than the time of saving and of logging.every_steps steps",
    )
    add_count(parser, "--save-seconds", 600, "S", "seconds for an evicted pod to save the run")
    _add_pod_arguments(parser)


def _add_pod_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `PodSettings`, and other Kubernetes-only settings of pods."""
    for flag, metavar, text in (
        ("--env", "NAME=VALUE", "variable of every pod"),
        ("--secret-env", "NAME=SECRET:KEY", "variable from a key of a Secret"),
        ("--env-from-secret", "SECRET", "every key of a Secret as a variable"),
        ("--node-selector", "LABEL=VALUE", "label that nodes must have"),
        ("--toleration", "KEY[=VALUE][:EFFECT]", "taint of nodes that pods tolerate"),
        ("--image-pull-secret", "SECRET", "Secret for the image's registry"),
        ("--rdma", "RESOURCE=N", "network cards of each node, such as rdma/hca=8"),
    ):
        _add_repeated(parser, flag, metavar, text)
    parser.add_argument(
        "--token-secret", metavar="NAME", help="short for --secret-env HF_TOKEN=NAME:HF_TOKEN"
    )
    parser.add_argument("--queue", metavar="NAME", help="LocalQueue of Kueue")
    parser.add_argument("--priority-class", metavar="NAME", help="PriorityClass of the pods")
    parser.add_argument(
        "--fs-group",
        type=int,
        default=1000,
        metavar="GID",
        help="group that may write the volume (default: 1000, the image's)",
    )
    parser.add_argument(
        "--patch",
        type=Path,
        metavar="FILE",
        help="YAML with metadata and spec that is merged into the pods' template, for fields "
        "without an option; named entries of lists are merged by name, and null removes a field",
    )


def run(args: argparse.Namespace) -> int:
    """Write (or print) the file. Raises ConfigError and LaunchError; then nothing is written."""
    suffix, start, text_of = {
        "slurm": (".sbatch", "start it with  sbatch", slurm_text),
        "torchrun": (".torchrun.sh", "start it on every node with  bash", torchrun_text),
        "kubernetes": (".kubernetes.yaml", "start it with  kubectl apply -f", kubernetes_text),
    }[args.kind]
    output = args.output or Path(f"{Path(args.config).stem}{suffix}")
    text = text_of(args, output)
    if args.dry_run:
        print(text, end="")
        return 0
    write_new(output, text)
    print(f"{output}: {start} {output}")
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


def slurm_text(args: argparse.Namespace, output: Path) -> str:
    """Return the script for `args`, checked by bash. `output` is not read."""
    from bigtrain.launchers.slurm import SlurmRequest, render_script, sbatch_options

    gpus, processes = processes_of(args)
    text = render_script(
        SlurmRequest(
            config=absolute(args.config),
            overrides=tuple(args.overrides),
            nodes=args.nodes,
            processes_per_node=processes,
            time=args.time,
            save_seconds=args.save_seconds,
            directory=str(Path.cwd()),
            deepspeed_config=args.deepspeed_config and absolute(args.deepspeed_config),
            gpus=gpus > 0,
            options=sbatch_options(args.sbatch),
            setup=tuple(args.setup),
        )
    )
    return _checked(text)


def torchrun_text(args: argparse.Namespace, output: Path) -> str:
    """Return the script for `args` that will be written to `output`, checked by bash."""
    from bigtrain.launchers.torchrun import TorchrunRequest, render_torchrun

    gpus, processes = processes_of(args)
    text = render_torchrun(
        TorchrunRequest(
            name=args.name or _name_of(args.config),
            config=absolute(args.config),
            overrides=tuple(args.overrides),
            nodes=args.nodes.replace(":", "-"),  # torchrun's own notation
            processes_per_node=processes,
            endpoint=args.rendezvous,
            directory=str(Path.cwd()),
            python=sys.executable,
            file=output.name,
            deepspeed_config=args.deepspeed_config and absolute(args.deepspeed_config),
            gpus=gpus > 0,
            restarts=args.restarts,
            heartbeat_timeout=args.heartbeat_timeout,
            last_call_timeout=args.last_call_timeout,
            threads=args.threads,
            setup=tuple(args.setup),
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
