"""Containers of the Dockerfile's image, and pods as a Kubernetes manifest asks for them.

The image is built by buildah upon a base that debootstrap makes, and runc runs it: as the image's
user, with a read-only root, in a network namespace of `network.py`. `Pods` reads the manifests of
``bigtrain launch kubernetes`` and does what Kubeflow Trainer, JobSet and a kubelet would do with
them. Needs root, Debian's packages (`make image-deps`), and the network for packages.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.support.worlds import ROOT

PROGRAMS = ("buildah", "debootstrap", "runc")
BASE, IMAGE = "localhost/bigtrain-test-base", "localhost/bigtrain-test"
_PACKAGES = "python3,python3-pip,python3-venv,ca-certificates"
_MIRROR = "http://deb.debian.org/debian"
_VENV = "/opt/python"
_PATH = f"{_VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def why_no_containers() -> str | None:
    """Return why images cannot be built and run here; None if they can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"{missing[0]} is not installed: make image-deps" if missing else None


def build_image(state: Path) -> Image:
    """Build the Dockerfile for CPUs, with pip's own indexes, and mount it; `Image.remove` unmounts
    and deletes it, and its base."""
    root = state / "debian"
    _run("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", root, _MIRROR)
    _run("chroot", root, "python3", "-m", "venv", _VENV)
    container = _run("buildah", "from", "scratch")
    _run("buildah", "add", "--quiet", container, root, "/")
    _run("buildah", "config", "--env", f"PATH={_PATH}", container)
    _run("buildah", "commit", "--quiet", "--rm", container, BASE)
    (state / "pip.conf").write_text(_pip_settings())
    places = [place for place in _local_places() if Path(place).exists()]
    mounts = [f"--volume={place}:{place}:ro" for place in places]
    log = _run(
        *("buildah", "build", "--isolation", "chroot", "--network", "host", "--layers=false"),
        *(*mounts, f"--volume={state / 'pip.conf'}:/etc/pip.conf:ro"),
        *("--build-arg", f"BASE_IMAGE={BASE}", "--build-arg", "DEVICE=cpu"),
        *("--build-arg", "TORCH_INDEX=", "--tag", IMAGE, ROOT),
    )
    (state / "build.log").write_text(log)
    container = _run("buildah", "from", IMAGE)
    described = json.loads(_run("buildah", "inspect", "--type", "image", IMAGE))["OCIv1"]["config"]
    size = sum(int(layer["size"]) for layer in json.loads(_manifest())["layers"])
    return Image(container, Path(_run("buildah", "mount", container)), described, size)


def _manifest() -> str:
    text: str = json.loads(_run("buildah", "inspect", "--type", "image", IMAGE))["Manifest"]
    return text


def _pip_settings() -> str:
    """Return this machine's settings of pip as a file: the image's packages come from where those
    of its tests do."""
    settings = {}
    for line in _run("python3", "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in ("global", ":env:") and key != "constraint":
            settings[key] = value.strip("'")
    return "[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items())


def _local_places() -> set[str]:
    words = _pip_settings().replace("file://", " ").split()
    places = {word for word in words if word.startswith("/")}
    return {f"/{Path(place).parts[1]}/{Path(place).parts[2]}" for place in places}


@dataclass(frozen=True)
class Image:
    """A built image: its mounted files, its configuration (Env, User, WorkingDir), and the bytes of
    its layers. container: buildah's name of what is mounted."""

    container: str
    root: Path
    config: Mapping[str, Any]
    size_bytes: int

    def remove(self) -> None:
        _run("buildah", "rm", self.container)
        _run("buildah", "rmi", IMAGE, BASE)


@dataclass
class Container:
    """A container that runs; its output is in `log`."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def signal(self, number: signal.Signals) -> None:
        """Send process 1 a signal, as a kubelet does."""
        _run("runc", "kill", self.name, str(int(number)))

    def wait(self, limit_seconds: float) -> int:
        """Return the exit code; kills the container and fails after the limit."""
        try:
            code = self.process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            said = self.log.read_text()[-4000:]
            raise AssertionError(f"{self.name} ran for {limit_seconds} s:\n{said}") from None
        subprocess.run(["runc", "delete", "--force", self.name], capture_output=True, check=False)
        return code

    def kill(self) -> None:
        subprocess.run(["runc", "delete", "--force", self.name], capture_output=True, check=False)
        self.process.wait()


def start(
    image: Image,
    bundle: Path,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    mounts: Sequence[Mapping[str, Any]] = (),
    group: int = 1000,
    network: int | None = None,
    memory_bytes: int | None = None,
    hosts: Mapping[str, str] | None = None,
) -> Container:
    """Start `command` in `image` as its user, whose root is read-only but for /tmp.

    bundle: folder for runc's configuration, of this container only; its name is the host's. mounts:
    as of the OCI runtime specification. network: process whose network namespace it shares
    (default: one of its own). memory_bytes: limit, after which the kernel kills. hosts: addresses
    of others by name.
    """
    bundle.mkdir(parents=True)
    _run("runc", "spec", "--bundle", bundle)
    names = {"localhost": "127.0.0.1", bundle.name: "127.0.0.1", **(hosts or {})}
    (bundle / "hosts").write_text("".join(f"{names[name]} {name}\n" for name in names))
    spec = json.loads((bundle / "config.json").read_text())
    user = int(str(image.config["User"]).partition(":")[0])
    variables = dict(pair.split("=", 1) for pair in image.config["Env"])
    spec["root"] = {"path": str(image.root), "readonly": True}
    spec["hostname"] = bundle.name
    spec["process"] |= {
        "terminal": False,
        "user": {"uid": user, "gid": user, "additionalGids": [group]},
        "args": list(command),
        "cwd": image.config["WorkingDir"],
        "env": [f"{key}={value}" for key, value in (variables | dict(environment or {})).items()],
        "capabilities": {},
        "noNewPrivileges": True,
    }
    replaced = {mount["destination"] for mount in mounts}
    spec["mounts"] = [m for m in spec["mounts"] if m["destination"] not in replaced]
    scratch = {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["mode=1777"]}
    spec["mounts"] += [scratch, bound(bundle / "hosts", "/etc/hosts", read_only=True), *mounts]
    namespaces = [one for one in spec["linux"]["namespaces"] if one["type"] != "network"]
    own = {"type": "network"} if network is None else _namespace(network)
    spec["linux"]["namespaces"] = [*namespaces, own]
    if memory_bytes is not None:
        spec["linux"]["resources"]["memory"] = {"limit": memory_bytes}
    name = f"{os.getpid()}-{bundle.parent.name}-{bundle.name}"
    spec["linux"]["cgroupsPath"] = f"/{name}"
    (bundle / "config.json").write_text(json.dumps(spec))
    log = bundle / "output.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["runc", "run", "--bundle", bundle, name],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    return Container(name, process, log)


def bound(source: Path, destination: str, *, read_only: bool = False) -> dict[str, Any]:
    """Return a bind mount."""
    options = ["rbind", "ro" if read_only else "rw"]
    return {
        "destination": destination,
        "type": "bind",
        "source": str(source),
        "options": options,
    }


def _namespace(pid: int) -> dict[str, str]:
    return {"type": "network", "path": f"/proc/{pid}/ns/net"}


@dataclass
class Pods:
    """Pods of a TrainJob, from its manifests: `networks` has a process for each, whose network it
    shares, `addresses` their addresses. claim: folder that stands for the volume. Each start of all
    pods has a number, as JobSet counts them."""

    image: Image
    manifests: str
    claim: Path
    folder: Path
    networks: Sequence[int]
    addresses: Sequence[str]
    num_starts: int = 0
    running: list[Container] = field(default_factory=list)

    def __post_init__(self) -> None:
        by_kind = {one["kind"]: one for one in yaml.safe_load_all(self.manifests)}
        self.job: dict[str, Any] = by_kind["TrainJob"]["spec"]["trainer"]
        runtime = by_kind["TrainingRuntime"]["spec"]["template"]["spec"]
        self.pod: dict[str, Any] = runtime["replicatedJobs"][0]["template"]["spec"]["template"]
        self.name: str = by_kind["TrainJob"]["metadata"]["name"]
        settings = self.folder / "config-map"
        settings.mkdir(parents=True)
        for name, text in by_kind["ConfigMap"]["data"].items():
            (settings / name).write_text(text)
        self.settings = settings
        # A kubelet gives a volume to the pod's group.
        os.chown(self.claim, 0, self.group)
        self.claim.chmod(0o2775)

    def __enter__(self) -> Pods:
        return self

    def __exit__(self, *_: object) -> None:
        for container in self.running:
            container.kill()

    @property
    def group(self) -> int:
        return int(self.pod["spec"]["securityContext"]["fsGroup"])

    @property
    def grace_seconds(self) -> int:
        return int(self.pod["spec"]["terminationGracePeriodSeconds"])

    def check(self, node: int = 0) -> tuple[int, str]:
        """Run the init container of a pod: exit code and output."""
        [container] = self.pod["spec"]["initContainers"]
        started = self._start(container, container["command"], f"check-{node}", node, {})
        return started.wait(120), started.log.read_text()

    def start(self) -> list[Container]:
        """Start all pods."""
        [container] = self.pod["spec"]["containers"]
        command = [*self.job["command"], *self.job["args"]]
        self.running = [
            self._start(container, command, f"node-{node}", node, self._variables(node))
            for node in range(int(self.job["numNodes"]))
        ]
        self.num_starts += 1
        return self.running

    def _variables(self, node: int) -> dict[str, str]:
        """Return what Trainer's torch policy adds (kubeflow/trainer, pkg/runtime/framework/plugins/
        torch)."""
        return {
            "PET_NNODES": str(self.job["numNodes"]),
            "PET_NPROC_PER_NODE": str(self.job["numProcPerNode"]),
            "PET_NODE_RANK": str(node),
            "PET_MASTER_ADDR": f"{self.name}-node-0-0.{self.name}",
            "PET_MASTER_PORT": "29400",
        }

    def _start(
        self,
        container: Mapping[str, Any],
        command: Sequence[str],
        name: str,
        node: int,
        variables: Mapping[str, str],
    ) -> Container:
        given = {one["name"]: one["value"] for one in container["env"]}
        hosts = {
            f"{self.name}-node-0-{number}.{self.name}": address
            for number, address in enumerate(self.addresses)
        }
        memory = self.job.get("resourcesPerNode", {}).get("limits", {}).get("memory")
        return start(
            self.image,
            self.folder / f"start-{self.num_starts}" / name,
            command,
            environment={**given, **variables, "GLOO_SOCKET_IFNAME": "eth0"},
            mounts=[self._mount(one) for one in container["volumeMounts"]],
            group=self.group,
            network=self.networks[node],
            memory_bytes=None if memory is None else num_bytes(memory),
            hosts=hosts | {name: self.addresses[node]},
        )

    def _mount(self, mount: Mapping[str, Any]) -> dict[str, Any]:
        [volume] = [one for one in self.pod["spec"]["volumes"] if one["name"] == mount["name"]]
        if "emptyDir" in volume:
            size = num_bytes(volume["emptyDir"]["sizeLimit"])
            options = ["nosuid", "nodev", "mode=1777", f"size={size}"]
            return {
                "destination": mount["mountPath"],
                "type": "tmpfs",
                "source": "tmpfs",
                "options": options,
            }
        source = self.settings if "configMap" in volume else self.claim
        return bound(source, mount["mountPath"], read_only=bool(mount.get("readOnly")))


def num_bytes(quantity: str) -> int:
    """Return a quantity of Kubernetes, such as 900Mi, in bytes."""
    for unit, size in _UNITS.items():
        if quantity.endswith(unit):
            return int(quantity.removesuffix(unit)) * size
    return int(quantity)


def _run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return done.stdout.strip()
