"""Manifests for Kubeflow Trainer: a ConfigMap with the run, a TrainingRuntime, a TrainJob, by the
template ``kubernetes.yaml``.

Written for trainer.kubeflow.org/v1alpha1 (kubeflow/trainer 8c0f505), whose torch policy gives the
container ``node`` the PET_* variables that torchrun reads. The failure policy matches the messages
of failed jobs (JobSet 0.10 and newer), since all failures that a podFailurePolicy catches have the
same reason.

Settings of a run's pods by the cluster operator: variables, Secrets, scheduling, a patch.
Pure except for reading the patch.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from bigtrain.errors import (
    EXIT_FAULTY_HOST,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    ConfigError,
    LaunchError,
    Problem,
)
from bigtrain.launchers.deepspeed_env import is_secret
from bigtrain.launchers.node_range import check_spares
from bigtrain.launchers.templates import render
from bigtrain.settings.deepspeed.engine_config import find_deepspeed_config
from bigtrain.settings.loading import find_config
from bigtrain.settings.resolve import ResolvedRun, resolve_run_files
from bigtrain.system.text_files import TextFileError, read_text
from bigtrain.system.units import GIB

_TOLERATION = re.compile(
    r"(?P<key>[^=:\s]+)(?:=(?P<value>[^:\s]*))?"
    r"(?::(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)
_SECRET_KEY = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?:[A-Za-z0-9._-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class PodSettings:
    """Settings of pods. `variables`: values by name; `secrets`: SECRET:KEY by the variable's name;
    `whole_secrets`: Secrets of which every key becomes a variable; `fs_group`: the group that owns
    the volume and as which the image runs; `patch`: merged into the pods' template."""

    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    whole_secrets: tuple[str, ...] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[str, ...] = ()
    image_pull_secrets: tuple[str, ...] = ()
    priority_class: str | None = None
    fs_group: int = 1000
    patch: Mapping[str, Any] = field(default_factory=dict)


def pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Return the values by name of `option`'s NAME=VALUE arguments. Raise LaunchError for a
    malformed or repeated argument."""
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            # The error omits the value, which may be a secret.
            raise LaunchError(f"{option} {name}: is not NAME=VALUE -> write {option} NAME=VALUE")
        if name in values:
            raise LaunchError(f"{option} {name} is given twice -> remove one")
        values[name] = value
    return values


def read_patch(path: Path | None) -> dict[str, Any]:
    """Return the patch of a pod's template in the YAML file `path`; empty without a file. Raise
    LaunchError for a file without such a patch."""
    if path is None:
        return {}
    try:
        patch = yaml.safe_load(read_text(path))
    except TextFileError as error:
        raise LaunchError(f"--patch {path} {error}") from error
    except yaml.YAMLError as error:
        raise LaunchError(f"--patch {path} cannot be read: {error}") from error
    defect = "is not a mapping"
    if isinstance(patch, dict):
        unknown_keys = sorted(map(str, set(patch) - {"metadata", "spec"}))
        if not unknown_keys:
            return patch
        defect = f"has {', '.join(unknown_keys)}"
    rule = "a pod's template has only metadata and spec"
    raise LaunchError(f"--patch {path}: {defect}, and {rule} -> write the rest below spec:")


def check_pod(pod: PodSettings) -> list[Problem]:
    """Return the problems of `pod`. Values of secrets are never shown."""
    problems = []
    for option, names in (("--env", pod.variables), ("--secret-env", pod.secrets)):
        problems += [
            Problem(option, name, "is not a variable name", f"{option} NAME=...")
            for name in names
            if not _VARIABLE.fullmatch(name)
        ]
    # Secrets are read from a Secret, never from the manifest.
    for name, value in pod.variables.items():
        if is_secret(name, value):
            rule = "is a secret, and everyone with access to the pods could read it"
            remedy = f"kubectl create secret generic NAME, and --secret-env {name}=NAME:KEY"
            problems.append(Problem("--env", name, rule, remedy))
        if name in pod.secrets:
            rule, remedy = "is also given by --secret-env or --token-secret", "remove one"
            problems.append(Problem("--env", name, rule, remedy))
    for name, key in pod.secrets.items():
        if not _SECRET_KEY.fullmatch(key):
            rule = "does not name a Secret and a key of it"
            problems.append(Problem("--secret-env", name, rule, f"--secret-env {name}=SECRET:KEY"))
    for text in pod.tolerations:
        if not _TOLERATION.fullmatch(text):
            rule = "is not a toleration KEY[=VALUE][:NoSchedule|PreferNoSchedule|NoExecute]"
            remedy = "--toleration nvidia.com/gpu:NoSchedule"
            problems.append(Problem("--toleration", text, rule, remedy))
    if pod.fs_group < 0:
        problems.append(Problem("--fs-group", pod.fs_group, "must be 0 or more", "--fs-group 1000"))
    return problems


def container_environment(pod: PodSettings, defaults: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields ``env`` and ``envFrom`` of a container: `defaults`, overridden by the
    variables of `pod`, and its secrets."""
    plain = {**defaults, **pod.variables}
    entries: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in plain.items() if name not in pod.secrets
    ]
    for name, reference in pod.secrets.items():
        secret, _, key = reference.partition(":")
        source = {"secretKeyRef": {"name": secret, "key": key}}
        entries.append({"name": name, "valueFrom": source})
    fields: dict[str, Any] = {"env": entries}
    if pod.whole_secrets:
        fields["envFrom"] = [{"secretRef": {"name": name}} for name in pod.whole_secrets]
    return fields


def scheduling_fields(pod: PodSettings) -> dict[str, Any]:
    """Return the scheduling fields of a pod: node selector, tolerations, priority, pull secrets."""
    tolerations = []
    for text in pod.tolerations:
        match = _TOLERATION.fullmatch(text)
        assert match is not None, text  # check_pod
        operator = "Exists" if match["value"] is None else "Equal"
        toleration = {"key": match["key"], "operator": operator}
        toleration |= {key: match[key] for key in ("value", "effect") if match[key] is not None}
        tolerations.append(toleration)
    fields = {
        "nodeSelector": dict(pod.node_selector),
        "tolerations": tolerations,
        "imagePullSecrets": [{"name": name} for name in pod.image_pull_secrets],
        "priorityClassName": pod.priority_class,
    }
    return {name: value for name, value in fields.items() if value}


def merge_patch(base: Any, patch: Any) -> Any:
    """Return `base` with `patch` merged in: mappings by key, lists of named entries by name; other
    values are replaced, and None removes a field."""
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        merged = {key: merge_patch(base.get(key), value) for key, value in patch.items()}
        fields = {**base, **merged}
        return {key: value for key, value in fields.items() if value is not None}
    if _is_named_list(base) and _is_named_list(patch):
        by_name = {entry["name"]: entry for entry in base}
        for entry in patch:
            by_name[entry["name"]] = merge_patch(by_name.get(entry["name"], {}), entry)
        return list(by_name.values())
    # A mapping replaces another kind of value without its fields that are None.
    return merge_patch({}, patch) if isinstance(patch, Mapping) else patch


def _is_named_list(value: Any) -> bool:
    """Return whether `value` is a list of mappings with a name, and not empty."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(entry, Mapping) and "name" in entry for entry in value)
    )


_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kMGT]|[KMGT]i)?")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SHARED_BYTES = 16 * GIB
"""Size of /dev/shm for Gloo, NCCL and data loaders."""
_PORT = 29400
_MOST_LOST_PODS = 100
_AGENT_CODES = (EXIT_FAULTY_HOST, 128 + 9, 128 + 15)
"""Exit codes of a pod that is lost while the run continues: faulty, killed, evicted."""

API = "trainer.kubeflow.org/v1alpha1"
_SETTINGS = "/etc/bigtrain"
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?")  # also a prefix of pods' names


@dataclass(frozen=True)
class KubernetesRequest:
    """Run and its Kubernetes settings.

    `claim` is a PersistentVolumeClaim that every node can write, mounted at `mount`; `gpus` 0 means
    CPUs with `processes_per_node` ranks. A pod that writes nothing for `hang_minutes` counts as
    hung, and all pods restart from the newest checkpoint, at most `restarts` times. `save_seconds`:
    termination grace period of an evicted pod. `shared_memory`: size of /dev/shm; None: 16 GiB and
    `memory_checkpoint_bytes`, which checkpoints in memory take (None: unknown). `spares`:
    pods beyond `nodes` that idle until one is lost; None: all pods start again instead. `ranks`:
    with spares, how ranks are started, a value of `torchrun.RANKS`. `rdma`: additional
    resources of each node by name. `queue`: name of Kueue's queue.
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
    shared_memory: str | None = None
    memory_checkpoint_bytes: float | None = 0.0
    spares: int | None = None
    ranks: str = "auto"
    restarts: int = 10
    hang_minutes: int = 60
    save_seconds: int = 600
    rdma: Mapping[str, str] = field(default_factory=dict)
    queue: str | None = None
    pod: PodSettings = field(default_factory=PodSettings)


def render_manifests(request: KubernetesRequest) -> str:
    """Return the manifests as one YAML stream. Raise ConfigError with all problems."""
    world_size = request.nodes * request.processes_per_node
    resolved = resolve_run_files(
        request.config,
        request.overrides,
        world_size,
        request.deepspeed_config,
        "cuda" if request.gpus else "cpu",
    )
    problems = [*_check_request(request), *_check_memory(request), *_check_paths(request, resolved)]
    problems += check_pod(request.pod)
    if problems:
        raise ConfigError(problems, "the Kubernetes job")
    files = {"run.yaml": find_config(request.config).read_text(encoding="utf-8")}
    ds_config = find_deepspeed_config(resolved.config.engine.deepspeed_config)
    files["deepspeed.json"] = ds_config.read_text(encoding="utf-8")
    variables = {"HF_HOME": f"{request.mount}/.hf"}
    if request.spares is not None:
        # Without this, a pod that joins gets the address of an earlier round.
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if request.cpus:  # torchrun's default is 1
        variables["OMP_NUM_THREADS"] = str(max(1, request.cpus // request.processes_per_node))
    amounts = {"cpu": request.cpus, "memory": request.memory, "nvidia.com/gpu": request.gpus}
    resources = {name: str(amount) for name, amount in amounts.items() if amount}
    text = render(
        "kubernetes.yaml",
        request=request,
        api=API,
        settings=_SETTINGS,
        files=files,
        arguments=[
            *("--config", f"{_SETTINGS}/run.yaml"),
            *("--deepspeed_config", f"{_SETTINGS}/deepspeed.json", *request.overrides),
        ],
        check=["bigtrain", "check", "--show", "output.directory", "--world-size", str(world_size)],
        environment=container_environment(request.pod, variables),
        scheduling=scheduling_fields(request.pod),
        directory=resolved.config.output.directory,
        liveness=liveness_command(resolved.config.output.directory, request.hang_minutes),
        resources=resources | dict(request.rdma),
        num_pods=request.nodes + (request.spares or 0),
        shared_memory=request.shared_memory or f"{math.ceil(_min_shared_bytes(request) / GIB)}Gi",
        endpoint=rendezvous_endpoint(request),
        agent=_agent_arguments(request),
        agent_codes=_AGENT_CODES,
        most_lost_pods=_MOST_LOST_PODS,
        exit_stopped=EXIT_STOPPED,
        exit_user_error=EXIT_USER_ERROR,
    )
    documents = list(yaml.safe_load_all(text))
    # The user's patch applies to the pods that train, not to the pod of the rendezvous.
    runtime = next(document for document in documents if document["kind"].endswith("Runtime"))
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pods = next(job for job in jobs if job["name"] == "node")["template"]["spec"]
    pods["template"] = merge_patch(pods["template"], request.pod.patch)
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False)


def rendezvous_endpoint(request: KubernetesRequest) -> str:
    """Return HOST:PORT of the pod that serves the rendezvous, by the name that JobSet gives it."""
    return f"{request.name}-rendezvous-0-0.{request.name}:{_PORT}"


def _agent_arguments(request: KubernetesRequest) -> list[str]:
    """Return the agent's arguments before ``train.py``. Without spares there are none: the agent
    then follows Kubeflow's variables, which arguments would override, and starts the ranks once."""
    if request.spares is None:
        return []
    forks = request.ranks == "forked" or (request.ranks == "auto" and not request.gpus)
    return [
        *(["--fork", "bigtrain.forked_rank"] if forks else []),
        *(f"--nnodes={request.nodes}", f"--nproc-per-node={request.processes_per_node}"),
        *(f"--max-restarts={_MOST_LOST_PODS}", "--monitor-interval=0.2"),
        *("--rdzv-backend=bigtrain", f"--rdzv-endpoint={rendezvous_endpoint(request)}"),
        *(f"--rdzv-id={request.name}", f"--rdzv-conf=is_host=0,spares={request.spares}"),
        *([] if forks else ["--no-python", "setpriv", "--pdeathsig", "KILL", "python3", "-u"]),
    ]


def _min_shared_bytes(request: KubernetesRequest) -> float:
    """Return the size of /dev/shm if the request names none."""
    return _SHARED_BYTES + (request.memory_checkpoint_bytes or 0.0)


def _parse_bytes(quantity: str) -> float | None:
    """Return the bytes of a quantity in Kubernetes's notation; None for any other text."""
    match = _QUANTITY.fullmatch(quantity)
    return None if match is None else float(match[1]) * _UNITS[match[2] or ""]


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes multi-line texts as readable, editable literal blocks and no YAML
    aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def liveness_command(directory: str, minutes: int) -> list[str]:
    """Return a command that succeeds if process 1 or the run's newest write is younger than
    `minutes`."""
    run = shlex.quote(directory)
    script = (
        f'[ -z "$(find /proc/1 -maxdepth 0 -mmin +{minutes})" ] || '
        f'[ -n "$(find {run}/metrics.jsonl {run}/log.txt {run}/checkpoints -mmin -{minutes})" ]'
    )
    return ["sh", "-c", script]


def _check_request(request: KubernetesRequest) -> list[Problem]:
    problems = []
    if not _NAME.fullmatch(request.name):
        rule = (
            "is not a Kubernetes name: lowercase letters, digits and -, at most 53, a letter first"
        )
        problems.append(Problem("--name", request.name, rule))
    if request.restarts < 0:
        rule = "must be 0 (none) or more"
        problems.append(Problem("--restarts", request.restarts, rule))
    problems += check_spares(request.spares)
    if not PurePosixPath(request.mount).is_absolute() or request.mount == "/":
        rule = "must be an absolute path, and not /"
        problems.append(Problem("--mount", request.mount, rule, "--mount /data"))
    return problems


def _check_memory(request: KubernetesRequest) -> list[Problem]:
    """Return problems of /dev/shm, whose files count as memory of the pod."""
    problems = []
    shared_option, checkpoint_bytes = "--shared-memory", request.memory_checkpoint_bytes
    for option, value in ((shared_option, request.shared_memory), ("--memory", request.memory)):
        if value is not None and _parse_bytes(value) is None:
            problems.append(Problem(option, value, "is not a size", f"{option} 400Gi"))
    if checkpoint_bytes is None and request.shared_memory is None:
        rule = "checkpoints in memory take as much of it as is unknown for this model"
        problems.append(Problem(shared_option, None, rule, "bigtrain check --gpu NAME predicts it"))
    # Of two sizes that are valid: /dev/shm holds the checkpoints, and the pod's memory /dev/shm.
    shared_bytes: float | None = _min_shared_bytes(request)
    if request.shared_memory:
        shared_bytes = _parse_bytes(request.shared_memory)
    min_gib = math.ceil((checkpoint_bytes or 0.0) / GIB) + 1
    if checkpoint_bytes and shared_bytes is not None and shared_bytes < min_gib * GIB:
        checkpoint_gib = f"{checkpoint_bytes / GIB:.3g} GiB"
        rule = f"is too small for checkpoints in memory, which take {checkpoint_gib}"
        remedy = f"{shared_option} {min_gib}Gi"
        problems.append(Problem(shared_option, request.shared_memory, rule, remedy))
    memory_bytes = _parse_bytes(request.memory) if request.memory else None
    if memory_bytes is not None and shared_bytes is not None and memory_bytes <= shared_bytes:
        shared_gib = f"{shared_bytes / GIB:.3g} GiB"
        rule = f"is not more than /dev/shm ({shared_gib}), whose files count as memory"
        problems.append(Problem("--memory", request.memory, rule, "more, or --shared-memory SIZE"))
    return problems


def _check_paths(request: KubernetesRequest, resolved: ResolvedRun) -> list[Problem]:
    """Return problems of paths that are not on the shared volume."""
    config = resolved.config
    paths = {"output.directory": config.output.directory}
    sources = enumerate(config.data.mixture)
    paths |= {config.data.key_of(index): source.path for index, source in sources}
    problems = []
    for key, path in paths.items():
        if not PurePosixPath(path).is_relative_to(request.mount):
            rule = f"is not on the shared volume, which pods see at {request.mount}"
            remedy = f"{key}={request.mount}/{Path(path).name}"
            problems.append(Problem(key, path, rule, remedy))
    return problems
