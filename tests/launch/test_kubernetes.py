"""`bigtrain launch kubernetes`: what the CRDs' own schemas accept, and what hangs together.

The schemas are not part of this project; where they are not at hand their tests say so and skip.
What no schema says (the controllers' behaviour, CEL rules) has not been tried on a cluster.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from bigtrain.cli import main as bigtrain
from bigtrain.launch.kubernetes import liveness_command
from bigtrain.train import build_parser as train_parser
from tests.support.worlds import ROOT

SCHEMAS = ROOT.parent / "shared" / "schemas"
COMMAND = ["launch", "kubernetes", "--config", "quickstart", "--image", "registry/bigtrain:1"]
PATHS = ["output.directory=/data/run", "data.path=/data/shards"]


def documents(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The manifests for the quickstart on two nodes, by kind."""
    node = ["--nodes", "2", "--gpus-per-node", "1", "--claim", "disk", "--dry-run"]
    assert bigtrain([*COMMAND, *node, *PATHS, *words]) == 0
    found = {document["kind"]: document for document in yaml.safe_load_all(capsys.readouterr().out)}
    assert list(found) == ["ConfigMap", "TrainingRuntime", "TrainJob"]
    return found


def closed(schema: Any) -> Any:
    """An OpenAPI schema of a CRD as JSON schema that refuses unknown fields, as `kubectl apply`
    with strict validation does, instead of dropping them."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result = {key: closed(value) for key, value in schema.items() if key != "format"}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    keeps_unknown = schema.get("x-kubernetes-preserve-unknown-fields")
    if is_object and "additionalProperties" not in schema and not keeps_unknown:
        result["additionalProperties"] = False
    return result


def validator(plural: str) -> jsonschema.Draft202012Validator:
    path = SCHEMAS / f"trainer.kubeflow.org_{plural}.yaml"
    if not path.is_file():
        pytest.skip(f"the CRD's schema is not at hand ({path})")
    definition = yaml.safe_load(path.read_text())
    [version] = definition["spec"]["versions"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--cpus", "16", "--memory", "64Gi", "--namespace", "team", "--token-secret", "hub"],
    ],
    ids=["short", "everything"],
)
def test_the_schemas_accept_them(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = documents(capsys, *words)
    for kind, plural in (("TrainingRuntime", "trainingruntimes"), ("TrainJob", "trainjobs")):
        errors = [error.message for error in validator(plural).iter_errors(found[kind])]
        assert errors == []


def test_the_schemas_refuse_a_misspelt_field(capsys: pytest.CaptureFixture[str]) -> None:
    found = documents(capsys)
    job = found["TrainJob"]
    job["spec"]["trainer"]["numNode"] = 2
    job["spec"]["trainer"]["numNodes"] = "2"
    messages = " ".join(error.message for error in validator("trainjobs").iter_errors(job))
    assert "numNode" in messages
    assert "'2' is not of type 'integer'" in messages
    runtime = found["TrainingRuntime"]
    [pod] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    [node] = pod["template"]["spec"]["template"]["spec"]["containers"]
    node["livenesProbe"] = node.pop("livenessProbe")
    [error] = validator("trainingruntimes").iter_errors(runtime)
    assert "livenesProbe" in error.message


def test_they_hang_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = documents(capsys, "--token-secret", "hub", "--deepspeed_config", "zero3")
    config, runtime, job = found.values()
    trainer = job["spec"]["trainer"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 1)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "1"}
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    template = replicated["template"]
    # What Kubeflow's torch policy looks for before it injects PET_* (constants of its controller).
    label = template["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
    pod = template["spec"]["template"]["spec"]
    [check], [node] = pod["initContainers"], pod["containers"]
    assert (label, replicated["name"], node["name"]) == ("trainer", "node", "node")
    mounted = {mount["mountPath"] for mount in node["volumeMounts"]}
    assert mounted == {"/data", "/dev/shm", "/etc/bigtrain"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in node["volumeMounts"]} == set(volumes)
    assert volumes["run"]["configMap"]["name"] == config["metadata"]["name"]
    [secret] = [entry for entry in node["env"] if entry["name"] == "HF_TOKEN"]
    assert secret["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "HF_TOKEN"}

    # The commands of both containers are ours to parse, on the files that the ConfigMap holds.
    for name, text in config["data"].items():
        (tmp_path / name).write_text(text)
    words = [word.replace("/etc/bigtrain", str(tmp_path)) for word in check["command"]]
    assert bigtrain(words[1:]) == 0
    assert capsys.readouterr().out == "/data/run\n"
    assert trainer["args"][0] == "bigtrain/train.py"
    train_parser().parse_intermixed_args(trainer["args"][1:])
    [rule] = template["spec"]["podFailurePolicy"]["rules"]
    assert (rule["onExitCodes"]["containerName"], rule["onExitCodes"]["values"]) == ("check", [2])


def test_liveness_command(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    run.mkdir()

    def alive(minutes: int) -> bool:
        return subprocess.run(liveness_command(str(run), minutes), check=False).returncode == 0

    # Process 1 of this machine is older than no minutes at all, and younger than a century.
    assert alive(60 * 24 * 365 * 100)
    assert not alive(0)
    (run / "log.txt").write_text("a line")
    os.utime(run / "log.txt", (2**31, 2**31))  # in the future: newer than any limit
    assert alive(1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.path=shards"], "data.path = 'shards': is not on the shared volume"),
        (["output.directory=/tmp/run"], "output.directory=/data/run"),
        (["--name", "Run_1"], "--name = 'Run_1': is no name for Kubernetes"),
        (["--mount", "data"], "--mount = 'data': must be an absolute path"),
        (["--nodes", "3"], "batch.global_samples"),
        (["--restarts", "-1"], "--restarts = -1: must be 0"),
    ],
)
def test_what_cannot_work_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "job.yaml"
    node = ["--gpus-per-node", "1", "--claim", "disk", "--output", str(output)]
    assert bigtrain([*COMMAND, *node, *PATHS, *words]) == 2
    assert said in capsys.readouterr().err
    assert not output.exists()
