"""Probe that `bigtrain doctor` runs on each host; it prints one line of JSON within a time limit.

``python -m bigtrain.launchers.doctor.host_probe NAME ARGUMENTS`` with ARGUMENTS as a JSON object.
Imports the standard library only, so that it also works on a host on which torch is broken.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import bigtrain
from bigtrain.launchers.deepspeed_env import NAME, inspect_environment_file
from bigtrain.launchers.doctor.verdicts import SHARED_BUFFERS
from bigtrain.system.listening import try_port
from bigtrain.system.machine import available_memory_bytes, library_versions

MARK = "BIGTRAIN-PROBE "
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_RETRY_SECONDS = 0.2
_SHARED_MEMORY = Path("/dev/shm")


def facts(directory: str) -> dict[str, Any]:
    """Return versions, devices, memory, disk below `directory`, clock and network of this host."""
    folders = (Path(directory), *Path(directory).parents)
    existing_folder = next(path for path in folders if path.exists())
    env_files = sorted({Path.home() / NAME, Path.cwd() / NAME})
    # GPUs that a process may use here; None without NVIDIA's driver.
    gpus, visible = Path("/proc/driver/nvidia/gpus"), os.environ.get("CUDA_VISIBLE_DEVICES")
    num_devices = None
    if gpus.is_dir():
        devices = filter(None, visible.split(",")) if visible else gpus.iterdir()
        num_devices = len(list(devices))
    driver = None
    with suppress(OSError):
        # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar ..."
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        words = text.split("\n", 1)[0].split()
        driver = next((word for word in words if word[:1].isdigit() and "." in word), text[:40])
    own_address = None
    with suppress(OSError):
        own_address = socket.gethostbyname(socket.gethostname())
    return {
        "hostname": socket.gethostname(),
        "versions": {**library_versions(), "driver": driver},
        "bigtrain_at": str(Path(bigtrain.__file__).parent),
        "devices": num_devices,
        "cores": len(os.sched_getaffinity(0)),
        "memory_available_gib": (available_memory_bytes() or 0) / 2**30,
        "disk_free_gib": shutil.disk_usage(existing_folder).free / 2**30,
        "shm_free_gib": shutil.disk_usage(_SHARED_MEMORY).free / 2**30,
        "shm_left_behind_gib": _left_behind_bytes(_SHARED_MEMORY) / 2**30,
        "interfaces": [name for _, name in socket.if_nameindex()],
        "interface_variables": {
            name: os.environ[name] for name in INTERFACE_VARIABLES if name in os.environ
        },
        "own_address": own_address,
        "free_port": try_port(),
        "environment_files": list(chain.from_iterable(map(inspect_environment_file, env_files))),
        "time": time.time(),  # last, so that it is closest to when the reply is received
    }


def announce(directory: str, token: str) -> dict[str, Any]:
    """Write a file into `directory` for other hosts to read. Return ``problem`` and ``made``, the
    folders that were created for it."""
    folder = Path(directory)
    made_folders = [str(path) for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f".doctor-{token}").write_text(token, encoding="utf-8")
    except OSError as error:
        return {"problem": error.strerror, "made": made_folders}
    return {"problem": None, "made": made_folders}


def collect(directory: str, token: str, made: list[str]) -> dict[str, Any]:
    """Return the hosts whose files are visible in `directory`; delete the files, and the folders
    `made`."""
    file_name = f".doctor-{token}"
    paths = list(Path(directory).glob(f"{file_name}*"))
    for path in paths:
        path.unlink(missing_ok=True)
    with suppress(OSError):  # another process may use them by now
        for folder in made:
            Path(folder).rmdir()
    return {"hosts": [path.name.removeprefix(f"{file_name}-") for path in paths]}


def shared(directory: str, token: str, name: str) -> dict[str, Any]:
    """Read the file that `announce` wrote into `directory`, and write a file of this host `name`
    there."""
    folder = Path(directory)
    try:
        content = (folder / f".doctor-{token}").read_text(encoding="utf-8")
    except FileNotFoundError:
        return {"problem": "does not see the file that this machine wrote there"}
    if content != token:
        return {"problem": "sees a file of that name with different contents"}
    (folder / f".doctor-{token}-{name}").write_text(token, encoding="utf-8")
    return {"problem": None}


def network(port: int, peers: dict[str, int], me: str, seconds: float) -> dict[str, Any]:
    """Listen on `port` and connect to every peer, until the peers have connected in both directions
    or `seconds` are over. peers: their ports; me: the name of this host.

    Return ``port``, why it cannot be used, and ``unreachable``, the last error by peer.
    """
    try:
        listener = socket.create_server(("", port), backlog=len(peers) + 1)
    except OSError as error:
        return {"port": f"port {port} cannot be used: {error.strerror}", "unreachable": {}}
    deadline = time.monotonic() + seconds
    connected: set[str] = set()
    threading.Thread(target=_accept, args=(listener, connected), daemon=True).start()
    unreachable = dict.fromkeys(peers, "not attempted")
    while time.monotonic() < deadline and (unreachable or len(connected) < len(peers)):
        for name in list(unreachable):
            timeout = max(0.1, min(5.0, deadline - time.monotonic()))
            try:
                with socket.create_connection((name, peers[name]), timeout=timeout) as connection:
                    connection.sendall(me.encode())
                del unreachable[name]
            except OSError as error:
                unreachable[name] = str(error)
        if unreachable or len(connected) < len(peers):
            time.sleep(_RETRY_SECONDS)
    listener.close()
    return {"port": None, "unreachable": unreachable}


def _accept(listener: socket.socket, connected: set[str]) -> None:
    """Add the names that peers send to `connected`, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.settimeout(5.0)
            try:
                connected.add(connection.recv(256).decode())
            except (OSError, UnicodeDecodeError):
                continue


def _left_behind_bytes(folder: Path) -> int:
    """Return the bytes of DeepSpeed's buffers in `folder` that no visible process has mapped."""
    buffers = {str(path): path.lstat().st_size for path in folder.glob(SHARED_BUFFERS)}
    if not buffers:
        return 0
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:  # another user's process, or it has ended
            continue
        mapped_paths = {line.split()[-1] for line in lines}
        buffers = {path: size for path, size in buffers.items() if path not in mapped_paths}
    return sum(buffers.values())


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "facts": facts,
    "announce": announce,
    "collect": collect,
    "shared": shared,
    "network": network,
}


def main(name: str, arguments: str, limit_seconds: str) -> int:
    """Run a probe and print its result; the alarm ends a probe that hangs."""
    signal.alarm(int(limit_seconds))
    result = PROBES[name](**json.loads(arguments))
    print(MARK + json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
