"""Settings of a run's pods by the cluster operator: variables, Secrets, scheduling, a patch.
Pure except for reading the patch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bigtrain.errors import LaunchError, Problem
from bigtrain.launchers.deepspeed_env import is_secret

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
    """Return values by name of `option`'s NAME=VALUE arguments. Raise LaunchError for a malformed
    or repeated one."""
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
    """Return the mapping in the YAML file `path`. Raise LaunchError if it has none."""
    if path is None:
        return {}
    try:
        patch = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LaunchError(f"--patch {path} cannot be read: {error}") from error
    unknown = sorted(map(str, set(patch) - {"metadata", "spec"})) if isinstance(patch, dict) else []
    if not isinstance(patch, dict) or unknown:
        has = f"has {', '.join(unknown)}" if unknown else "is not a mapping"
        rule = "a pod's template has only metadata and spec"
        raise LaunchError(f"--patch {path}: {has}, and {rule} -> write the rest below spec:")
    return patch


def check_pod(pod: PodSettings) -> list[Problem]:
    """Return the problems of `pod`. Values of secrets are never shown."""
    problems = []
    for option, names in (("--env", pod.variables), ("--secret-env", pod.secrets)):
        problems += [
            Problem(option, name, "is not a variable name", f"{option} NAME=...")
            for name in names
            if not _VARIABLE.fullmatch(name)
        ]
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


def environment_of(pod: PodSettings, defaults: Mapping[str, str]) -> dict[str, Any]:
    """Return ``env`` and ``envFrom`` of a container; `pod` may override the variables
    `defaults`."""
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


def placed(pod: PodSettings) -> dict[str, Any]:
    """Return the scheduling fields of a pod: node selector, tolerations, priority, pull secrets."""
    fields = {
        "nodeSelector": dict(pod.node_selector),
        "tolerations": [_toleration(text) for text in pod.tolerations],
        "imagePullSecrets": [{"name": name} for name in pod.image_pull_secrets],
        "priorityClassName": pod.priority_class,
    }
    return {name: value for name, value in fields.items() if value}


def _toleration(text: str) -> dict[str, str]:
    match = _TOLERATION.fullmatch(text)
    assert match is not None, text  # check_pod
    operator = {"operator": "Exists"} if match["value"] is None else {"operator": "Equal"}
    fields = {"key": match["key"], **operator, "value": match["value"], "effect": match["effect"]}
    return {name: value for name, value in fields.items() if value is not None}


def patched(base: Any, patch: Any) -> Any:
    """Return `base` with `patch` merged in: mappings by key, lists of named entries by name, the
    rest is replaced; None removes a field."""
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        merged = {key: patched(base.get(key), value) for key, value in patch.items()}
        both = {**base, **merged}
        return {key: value for key, value in both.items() if value is not None}
    if _are_named(base) and _are_named(patch):
        by_name = {entry["name"]: entry for entry in base}
        for entry in patch:
            by_name[entry["name"]] = patched(by_name.get(entry["name"], {}), entry)
        return list(by_name.values())
    return patched({}, patch) if isinstance(patch, Mapping) else patch


def _are_named(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(entry, Mapping) and "name" in entry for entry in value)
    )
