"""`bigtrain launch kubernetes`: what the CRDs' own schemas accept, and what hangs together.

The schemas are not part of this project; where they are not at hand their tests say so and skip.
What no schema says (the controllers' behaviour, CEL rules) has not been tried on a cluster.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from bigtrain.cli import main as bigtrain
from bigtrain.errors import EXIT_FAULTY_HOST, EXIT_STOPPED, EXIT_USER_ERROR
from bigtrain.launchers.kubernetes import liveness_command
from bigtrain.train import build_parser as train_parser
from tests.launch.test_rendezvous import Hosts, ended
from tests.support.cluster import wait_until
from tests.support.worlds import ROOT

SCHEMAS = ROOT.parent / "shared" / "schemas"
COMMAND = ["launch", "kubernetes", "--config", "quickstart", "--image", "registry/bigtrain:1"]
EVERYTHING = (
    "--cpus 16 --memory 64Gi --namespace team --token-secret hub --save-seconds 900 "
    "--env SITE=here "
    "--secret-env WANDB_API_KEY=wandb:key --env-from-secret comet --node-selector pool=h100 "
    "--toleration nvidia.com/gpu:NoSchedule --toleration team=llm --toleration spot "
    "--image-pull-secret registry --rdma rdma/hca=8 --queue llm --priority-class high "
    "--fs-group 2000"
).split()
PATCH = """
metadata: {annotations: {site/profile: llm}}
spec:
  hostNetwork: true
  securityContext: {fsGroupChangePolicy: null, supplementalGroups: [7]}
  containers:
  - name: node
    readinessProbe: null
    env: [{name: HF_HOME, value: /scratch}, {name: MORE, value: "1"}]
    volumeMounts: [{name: scratch, mountPath: /scratch}]
  volumes:
  - name: scratch
    emptyDir: {}
  - name: shm
    emptyDir: {sizeLimit: 64Gi}
"""
PATHS = ["output.directory=/data/run", "data.path=/data/shards"]


def documents(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The manifests for the quickstart on two nodes, by kind."""
    node = ["--nodes", "2", "--gpus-per-node", "1", "--claim", "disk", "--dry-run"]
    assert bigtrain([*COMMAND, *node, *PATHS, *words]) == 0
    documents_by_kind = {
        document["kind"]: document for document in yaml.safe_load_all(capsys.readouterr().out)
    }
    assert list(documents_by_kind) == ["ConfigMap", "TrainingRuntime", "TrainJob"]
    return documents_by_kind


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
        EVERYTHING,
        ["--patch", "patch.yaml"],
        ["--spares", "1", *EVERYTHING],
    ],
    ids=["short", "everything", "patched", "spares"],
)
def test_the_schemas_accept_them(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("patch.yaml").write_text(PATCH)
    documents_by_kind = documents(capsys, *words)
    for kind, plural in (("TrainingRuntime", "trainingruntimes"), ("TrainJob", "trainjobs")):
        errors = [error.message for error in validator(plural).iter_errors(documents_by_kind[kind])]
        assert errors == []


def test_the_schemas_refuse_a_misspelt_field(capsys: pytest.CaptureFixture[str]) -> None:
    documents_by_kind = documents(capsys)
    job = documents_by_kind["TrainJob"]
    job["spec"]["trainer"]["numNode"] = 2
    job["spec"]["trainer"]["numNodes"] = "2"
    messages = " ".join(error.message for error in validator("trainjobs").iter_errors(job))
    assert "numNode" in messages
    assert "'2' is not of type 'integer'" in messages
    runtime = documents_by_kind["TrainingRuntime"]
    [pod] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    [node] = pod["template"]["spec"]["template"]["spec"]["containers"]
    node["livenesProbe"] = node.pop("livenessProbe")
    [error] = validator("trainingruntimes").iter_errors(runtime)
    assert "livenesProbe" in error.message


def test_they_hang_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    documents_by_kind = documents(capsys, "--token-secret", "hub", "--deepspeed_config", "zero3")
    config, runtime, job = documents_by_kind.values()
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
    assert trainer["command"] == ["python3", "-m", "bigtrain.launchers.agent"]
    assert trainer["args"][0] == "bigtrain/train.py"
    train_parser().parse_intermixed_args(trainer["args"][1:])


def node_pod(documents_by_kind: dict[str, Any]) -> dict[str, Any]:
    """The pods' template."""
    replicated = documents_by_kind["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][
        -1
    ]
    return replicated["template"]["spec"]["template"]


def test_what_a_site_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    documents_by_kind = documents(capsys, *EVERYTHING)
    pod = node_pod(documents_by_kind)["spec"]
    [check], [node] = pod["initContainers"], pod["containers"]
    assert node["env"] == check["env"]
    variables = {entry["name"]: entry for entry in node["env"]}
    assert variables["SITE"]["value"] == "here"
    assert variables["OMP_NUM_THREADS"]["value"] == "16"  # one process on 16 cores
    keys = {
        name: tuple(entry["valueFrom"]["secretKeyRef"].values())
        for name, entry in variables.items()
        if "valueFrom" in entry
    }
    assert keys == {"WANDB_API_KEY": ("wandb", "key"), "HF_TOKEN": ("hub", "HF_TOKEN")}
    assert node["envFrom"] == [{"secretRef": {"name": "comet"}}]
    assert pod["nodeSelector"] == {"pool": "h100"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "llm"},
        {"key": "spot", "operator": "Exists"},
    ]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["priorityClassName"] == "high"
    assert pod["securityContext"]["fsGroup"] == 2000
    assert node["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    job = documents_by_kind["TrainJob"]
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "llm"}
    assert job["spec"]["trainer"]["resourcesPerNode"]["limits"]["rdma/hca"] == "8"


def test_the_volume_is_the_images_and_a_save_has_time(capsys: pytest.CaptureFixture[str]) -> None:
    pod = node_pod(documents(capsys))["spec"]
    user = re.search(r"^USER (\d+):(\d+)$", (ROOT / "Dockerfile").read_text(), flags=re.M)
    assert user is not None
    assert pod["securityContext"]["fsGroup"] == int(user[2])
    assert pod["terminationGracePeriodSeconds"] == 600
    [node] = pod["containers"]
    assert node["livenessProbe"]["terminationGracePeriodSeconds"] == 30  # it hangs: no save
    cpus = documents(capsys, "batch.micro_batch_size=1", "--gpus-per-node", "4", "--cpus", "48")
    [threads] = [e for e in node_pod(cpus)["spec"]["containers"][0]["env"] if "OMP" in e["name"]]
    assert threads["value"] == "12"


def action(documents_by_kind: dict[str, Any], **pod: Any) -> str:
    """What JobSet does where a `pod` has failed first, by the rules in their order.

    As Kubernetes (pkg/controller/job/pod_failure_policy.go) and JobSet (failure_policy.go) do.
    """
    spec = documents_by_kind["TrainingRuntime"]["spec"]["template"]["spec"]
    job = spec["replicatedJobs"][-1]["template"]["spec"]
    replaced = "the pod is replaced" if job["backoffLimit"] else ""
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        codes = rule.get("onExitCodes", {})
        conditions = [one["type"] for one in rule.get("onPodConditions", ())]
        code, values = pod.get(codes.get("containerName")), codes.get("values", ())
        exits = code in values if codes.get("operator") == "In" else code not in (None, *values)
        if (codes and exits) or pod.get("condition") in conditions:
            reason, message = "PodFailurePolicy", f"... matching FailJob rule at index {index}"
            replaced = "replaced, not counted" if rule["action"] == "Ignore" else ""
            break
    if replaced:
        return replaced
    for rule in spec["failurePolicy"]["rules"]:
        patterns = rule["onJobFailureMessagePatterns"]
        if reason in rule["onJobFailureReasons"] and any(re.search(p, message) for p in patterns):
            return str(rule["action"])
    return "RestartJobSet"


def test_preemptions_leave_the_restarts_alone(capsys: pytest.CaptureFixture[str]) -> None:
    documents_by_kind = documents(capsys)
    free = "RestartJobSetAndIgnoreMaxRestarts"
    assert action(documents_by_kind, condition="DisruptionTarget", node=137) == free
    assert action(documents_by_kind, node=EXIT_STOPPED) == free  # its peers, which saved with it
    assert action(documents_by_kind, node=1) == "RestartJobSet"
    assert action(documents_by_kind, check=EXIT_USER_ERROR) == "FailJobSet"


def test_a_lost_pod_is_replaced_while_the_others_stay(capsys: pytest.CaptureFixture[str]) -> None:
    documents_by_kind = documents(capsys, "--spares", "1")
    assert (
        action(documents_by_kind, condition="DisruptionTarget", node=143) == "replaced, not counted"
    )
    for code in (137, EXIT_FAULTY_HOST):  # killed, as without memory; its agent left the run
        assert action(documents_by_kind, node=code) == "the pod is replaced"
    # The run itself has ended: its restarts are used up, or its rendezvous cannot be reached.
    assert action(documents_by_kind, node=1) == "RestartJobSet"
    assert action(documents_by_kind, node=EXIT_STOPPED) == "RestartJobSetAndIgnoreMaxRestarts"
    assert action(documents_by_kind, check=EXIT_USER_ERROR) == "FailJobSet"


def test_pods_with_spares_meet(capsys: pytest.CaptureFixture[str]) -> None:
    documents_by_kind = documents(capsys, "--spares", "2")
    spec = documents_by_kind["TrainingRuntime"]["spec"]["template"]["spec"]
    rendezvous, node = spec["replicatedJobs"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": [node["name"]]}
    assert node["dependsOn"] == [{"name": rendezvous["name"], "status": "Ready"}]
    assert documents_by_kind["TrainJob"]["spec"]["trainer"]["numNodes"] == 4
    assert documents_by_kind["TrainingRuntime"]["spec"]["mlPolicy"]["numNodes"] == 4
    # As JobSet names pods: JOBSET-JOB-0-0, in the domain of the JobSet.
    name = documents_by_kind["TrainJob"]["metadata"]["name"]
    endpoint = f"{name}-{rendezvous['name']}-0-0.{name}:29400"
    [server] = rendezvous["template"]["spec"]["template"]["spec"]["containers"]
    assert server["command"][-2:] == ["bigtrain.launchers.rendezvous_server", endpoint]
    assert server["readinessProbe"]["tcpSocket"]["port"] == 29400
    arguments = documents_by_kind["TrainJob"]["spec"]["trainer"]["args"]
    assert f"--rdzv-endpoint={endpoint}" in arguments
    assert {"--nnodes=2", "--rdzv-conf=is_host=0,spares=2"} <= set(arguments)
    # All 4 have an agent, but the run has the ranks of 2.
    [check] = node_pod(documents_by_kind)["spec"]["initContainers"]
    assert check["command"][check["command"].index("--world-size") + 1] == "2"
    assert "setpriv" in arguments
    forked = documents(capsys, "--spares", "2", "--ranks", "forked")
    assert forked["TrainJob"]["spec"]["trainer"]["args"][:2] == ["--fork", "bigtrain.forked_rank"]


class Pods(Hosts):
    """Pods of a TrainJob as processes here: their command, and the variables that Kubeflow's torch
    policy sets. In place of train.py they run the worker of `Hosts`."""

    def __init__(self, folder: Path, documents_by_kind: dict[str, Any]) -> None:
        super().__init__(folder, "", 0)
        trainer = documents_by_kind["TrainJob"]["spec"]["trainer"]
        self.num_pods = trainer["numNodes"]
        [node] = node_pod(documents_by_kind)["spec"]["containers"]
        self.variables = {entry["name"]: entry["value"] for entry in node["env"]}
        words = [*trainer["command"], *trainer["args"]]
        self.words = words[: words.index("bigtrain/train.py")]

    def command(self, name: str) -> list[str]:
        words = [sys.executable if word == "python3" else word for word in self.words]
        words = [re.sub(r"(endpoint=)\S+", rf"\g<1>127.0.0.1:{self.port}", one) for one in words]
        return [*words, str(self.folder / "worker.py"), str(self.folder), name]

    def start_pod(self, name: str, index: int) -> None:
        policy = {"PET_NNODES": str(self.num_pods), "PET_NPROC_PER_NODE": "1"}
        policy |= {"PET_NODE_RANK": str(index), "PET_MASTER_ADDR": "x-node-0-0.x"}
        self.start(name, **self.variables, **policy, PET_MASTER_PORT="29500")


@pytest.mark.slow
@pytest.mark.distributed
def test_the_pods_command_replaces_a_lost_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The processes are those of the manifests; what creates pods anew has not been tried."""
    with ended(Pods(tmp_path, documents(capsys, "--spares", "1"))) as pods:
        for index, name in enumerate("abc"):
            pods.start_pod(name, index)
        wait_until("two pods train", lambda: len(pods.started()) == 2, 100)
        training = {line[-1]: line[0] for line in pods.started()}
        [spare] = set("abc") - set(training)
        wait_until("one is a spare", lambda: "this one is a spare" in pods.log(spare), 100)
        lost, stays = sorted(training)
        pods.agents[lost].kill()
        pods.wait_for(f"{training[lost]} of 2 at {spare}", f"{training[stays]} of 2 at {stays}")
        pods.start_pod("d", "abc".index(lost))  # the pod that replaces it
        wait_until("it is a spare", lambda: "this one is a spare" in pods.log("d"), 100)
        for name in (spare, stays):
            pods.end(name, 0)
        codes = [pods.agents[name].wait(100) for name in (spare, stays, "d")]
        assert codes == [0, 0, 0]
        assert pods.result() == 0


IN_MEMORY = "checkpoint.memory={every_steps: 1, copies: 1}"
LARGE = [
    "model.config.hidden_size=4096",
    "model.config.num_attention_heads=32",
    "model.config.num_key_value_heads=32",
    "model.config.num_hidden_layers=16",
    "model.config.intermediate_size=11008",
]


def test_shared_memory_holds_the_checkpoints_that_check_predicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def size(*words: str) -> str:
        volumes = {v["name"]: v for v in node_pod(documents(capsys, *words))["spec"]["volumes"]}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        return str(volumes["shm"]["emptyDir"]["sizeLimit"])

    assert size(*LARGE) == "16Gi"
    # The checkout may have a quickstart run, with its smaller model.
    check = ["check", "--config", "quickstart", f"output.directory={tmp_path}", "--world-size", "2"]
    assert bigtrain([*check, *LARGE, IN_MEMORY]) == 0
    said = capsys.readouterr().out
    [need] = re.findall(r"checkpoints in memory: ([0-9.]+) GiB for one rank", said)
    assert float(need) > 20  # it is a large one
    assert size(*LARGE, IN_MEMORY) == f"{16 + math.ceil(float(need))}Gi"
    assert size(*LARGE, IN_MEMORY, "--shared-memory", "900Gi") == "900Gi"


def test_patch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patch = tmp_path / "patch.yaml"
    patch.write_text(PATCH)
    before = node_pod(documents(capsys))
    documents_by_kind = documents(capsys, "--patch", str(patch))
    after = node_pod(documents_by_kind)
    assert after["metadata"] == {"annotations": {"site/profile": "llm"}}
    spec = after["spec"]
    assert spec["hostNetwork"] is True
    assert spec["securityContext"] == {"fsGroup": 1000, "supplementalGroups": [7]}
    assert spec["initContainers"] == before["spec"]["initContainers"]
    [node] = spec["containers"]
    assert "readinessProbe" not in node
    assert node["env"] == [{"name": "HF_HOME", "value": "/scratch"}, {"name": "MORE", "value": "1"}]
    assert [m["name"] for m in node["volumeMounts"]] == ["data", "run", "shm", "scratch"]
    shm = {volume["name"]: volume for volume in spec["volumes"]}["shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}


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
        (["--name", "Run_1"], "--name = 'Run_1': is not a Kubernetes name"),
        (["--mount", "data"], "--mount = 'data': must be an absolute path"),
        (["--nodes", "3"], "batch.global_batch_size"),
        (["--restarts", "-1"], "--restarts = -1: must be 0"),
        (["--spares", "-1"], "--spares = -1: is negative -> --spares 0"),
        (["--memory", "lots"], "--memory = 'lots': is not a size -> --memory 400Gi"),
        (["--memory", "16Gi"], "--memory = '16Gi': is not more than /dev/shm (16 GiB)"),
        (
            ["--shared-memory", "16Gi", *LARGE, IN_MEMORY],
            "--shared-memory = '16Gi': is too small for checkpoints in memory, which take ",
        ),
        (["--env", "HF_TOKEN=geheim"], "--env = 'HF_TOKEN': is a secret"),
        (["--env", "https_proxy=http://me:geheim@b"], "--secret-env https_proxy=NAME:KEY"),
        (["--env", "geheim"], "--env geheim: is not NAME=VALUE"),
        (["--env", "a-b=1"], "--env = 'a-b': is not a variable name"),
        (["--env", "A=1", "--env", "A=2"], "--env A is given twice"),
        (["--secret-env", "A=b"], "--secret-env = 'A': does not name a Secret and a key"),
        (["--toleration", "a=b:Never"], "--toleration = 'a=b:Never': is not a toleration"),
        (["--patch", "not.there"], "--patch not.there cannot be read"),
        (["--patch", str(ROOT / "bigtrain/recipes/quickstart.yaml")], "only metadata and spec"),
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
