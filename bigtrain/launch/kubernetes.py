"""Manifests for Kubeflow Trainer: a ConfigMap with the run, a TrainingRuntime, a TrainJob. Pure.

Written for trainer.kubeflow.org/v1alpha1 (kubeflow/trainer 8c0f505), whose torch policy gives the
container ``node`` the PET_* variables that torchrun reads.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from bigtrain.config_loading import find_config
from bigtrain.engine.deepspeed_config import find_deepspeed_config
from bigtrain.engine.resolve import ResolvedRun, resolve_run_files
from bigtrain.errors import EXIT_USER_ERROR, ConfigError, Problem

API = "trainer.kubeflow.org/v1alpha1"
_SETTINGS = "/etc/bigtrain"
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?")  # also a prefix of pods' names


@dataclass(frozen=True)
class KubernetesRequest:
    """A run, and where it runs.

    `claim` is a PersistentVolumeClaim that every node can write, seen at `mount`; `gpus` 0 means
    CPUs with `processes_per_node` processes. A pod that wrote nothing for `hang_minutes` is taken
    for hung and everything starts again, `restarts` times at most, each from the newest checkpoint.
    """

    name: str
    config: str
    overrides: tuple[str, ...]
    nodes: int
    gpus: int
    processes_per_node: int
    image: str
    claim: str
    mount: str
    deepspeed_config: str | None = None
    namespace: str | None = None
    cpus: int | None = None
    memory: str | None = None
    shared_memory: str = "16Gi"
    restarts: int = 10
    hang_minutes: int = 60
    token_secret: str | None = None


def render_manifests(request: KubernetesRequest) -> str:
    """The manifests as one YAML stream. Raises ConfigError with everything that is wrong."""
    resolved = resolve_run_files(
        request.config,
        request.overrides,
        request.nodes * request.processes_per_node,
        request.deepspeed_config,
        "cuda" if request.gpus else "cpu",
    )
    problems = [*_check_request(request), *_check_paths(request, resolved)]
    if problems:
        raise ConfigError(problems, "the Kubernetes job")
    files = {"run.yaml": find_config(request.config).read_text(encoding="utf-8")}
    ds_config = find_deepspeed_config(resolved.config.engine.deepspeed_config)
    files["deepspeed.json"] = ds_config.read_text(encoding="utf-8")
    documents = [
        {**_head("v1", "ConfigMap", request, "-run"), "data": files},
        {**_head(API, "TrainingRuntime", request, ""), "spec": _runtime(request, resolved)},
        {**_head(API, "TrainJob", request, ""), "spec": _job(request)},
    ]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stand as they are, so that people can read and change them; values
    that occur twice are written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _head(api: str, kind: str, request: KubernetesRequest, suffix: str) -> dict[str, Any]:
    metadata = {"name": f"{request.name}{suffix}"}
    if request.namespace:
        metadata["namespace"] = request.namespace
    return {"apiVersion": api, "kind": kind, "metadata": metadata}


def _arguments(request: KubernetesRequest) -> list[str]:
    files = ["--config", f"{_SETTINGS}/run.yaml", "--deepspeed_config"]
    return [*files, f"{_SETTINGS}/deepspeed.json", *request.overrides]


def _job(request: KubernetesRequest) -> dict[str, Any]:
    resources: dict[str, Any] = {}
    if request.cpus:
        resources["cpu"] = str(request.cpus)
    if request.memory:
        resources["memory"] = request.memory
    if request.gpus:
        resources["nvidia.com/gpu"] = str(request.gpus)
    trainer: dict[str, Any] = {
        "image": request.image,
        "numNodes": request.nodes,
        "numProcPerNode": request.processes_per_node,
        "command": ["torchrun"],
        "args": ["bigtrain/train.py", *_arguments(request)],
    }
    if resources:
        trainer["resourcesPerNode"] = {"requests": resources, "limits": resources}
    reference = {"apiGroup": API.split("/")[0], "kind": "TrainingRuntime", "name": request.name}
    return {"runtimeRef": reference, "trainer": trainer}


def _runtime(request: KubernetesRequest, resolved: ResolvedRun) -> dict[str, Any]:
    """The runtime: what every pod has, and when everything starts again."""
    restart = {
        "maxRestarts": request.restarts,
        # A run that is wrong stays wrong: `check` below ends it at its first start.
        "rules": [
            {
                "name": "wrongrun",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        ],
    }
    wrong = {
        "action": "FailJob",
        "onExitCodes": {"containerName": "check", "operator": "In", "values": [EXIT_USER_ERROR]},
    }
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job = {
        "metadata": {"labels": labels},
        "spec": {
            "backoffLimit": 0,  # one pod alone cannot rejoin: the whole set starts again
            "podFailurePolicy": {"rules": [wrong]},
            "template": {"spec": _pod(request, resolved)},
        },
    }
    replicated = [{"name": "node", "template": job}]
    return {
        "mlPolicy": {"numNodes": request.nodes, "torch": {}},
        "template": {"spec": {"failurePolicy": restart, "replicatedJobs": replicated}},
    }


def _pod(request: KubernetesRequest, resolved: ResolvedRun) -> dict[str, Any]:
    volumes = [
        {"name": "data", "persistentVolumeClaim": {"claimName": request.claim}},
        {"name": "run", "configMap": {"name": f"{request.name}-run"}},
        # Gloo, NCCL and data loaders share memory there; a container's default is 64 MiB.
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": request.shared_memory}},
    ]
    mounts = [
        {"name": "data", "mountPath": request.mount},
        {"name": "run", "mountPath": _SETTINGS, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    environment: list[dict[str, Any]] = [{"name": "HF_HOME", "value": f"{request.mount}/.hf"}]
    if request.token_secret:
        key = {"name": request.token_secret, "key": "HF_TOKEN"}
        environment.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}})
    world_size = str(request.nodes * request.processes_per_node)
    check = ["bigtrain", "check", "--show", "output.directory", "--world-size", world_size]
    directory = resolved.config.output.directory
    common = {"image": request.image, "env": environment, "volumeMounts": mounts}
    return {
        "restartPolicy": "Never",
        "initContainers": [{"name": "check", "command": [*check, *_arguments(request)], **common}],
        "containers": [
            {
                "name": "node",
                **common,
                "readinessProbe": {
                    "exec": {"command": ["test", "-s", f"{directory}/log.txt"]},
                    "periodSeconds": 30,
                },
                "livenessProbe": {
                    "exec": {"command": liveness_command(directory, request.hang_minutes)},
                    "periodSeconds": 60,
                    "timeoutSeconds": 30,
                    "failureThreshold": 3,
                },
            }
        ],
        "volumes": volumes,
    }


def liveness_command(directory: str, minutes: int) -> list[str]:
    """True while process 1 is younger than `minutes`, or the run wrote something since then."""
    run = shlex.quote(directory)
    script = (
        f'[ -z "$(find /proc/1 -maxdepth 0 -mmin +{minutes})" ] || '
        f'[ -n "$(find {run}/metrics.jsonl {run}/log.txt {run}/checkpoints -mmin -{minutes})" ]'
    )
    return ["sh", "-c", script]


def _check_request(request: KubernetesRequest) -> list[Problem]:
    problems = []
    if not _NAME.fullmatch(request.name):
        rule = "is no name for Kubernetes: small letters, digits and -, at most 53, a letter first"
        problems.append(Problem("--name", request.name, rule))
    if request.restarts < 0:
        rule = "must be 0 (none) or more"
        problems.append(Problem("--restarts", request.restarts, rule))
    if not PurePosixPath(request.mount).is_absolute() or request.mount == "/":
        rule = "must be an absolute path, and not /"
        problems.append(Problem("--mount", request.mount, rule, "--mount /data"))
    return problems


def _check_paths(request: KubernetesRequest, resolved: ResolvedRun) -> list[Problem]:
    """Paths that pods would write or look for outside of what they share."""
    config = resolved.config
    paths = {"output.directory": config.output.directory}
    paths |= {config.data.key_of(i): s.path for i, s in enumerate(config.data.mixture)}
    problems = []
    for key, path in paths.items():
        if not PurePosixPath(path).is_relative_to(request.mount):
            rule = f"is not on the shared volume, which pods see at {request.mount}"
            remedy = f"{key}={request.mount}/{Path(path).name}"
            problems.append(Problem(key, path, rule, remedy))
    return problems
