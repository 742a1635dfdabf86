"""The doctor's verdicts on what its probes say, and the probes on this machine."""

from __future__ import annotations

import copy
import mmap
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from bigtrain.cli import main as bigtrain
from bigtrain.launchers.doctor import host_probe as probe
from bigtrain.launchers.doctor import verdicts as findings
from bigtrain.launchers.doctor.transport import ask_all
from bigtrain.launchers.doctor.verdicts import Finding
from bigtrain.launchers.hostfile import Host
from bigtrain.system.listening import try_port

FACT: dict[str, Any] = {
    "versions": {"Python": "3.11.7", "torch": "2.13.0", "driver": "580.1"},
    "devices": 8,
    "cores": 64,
    "memory_available_gib": 400.0,
    "disk_free_gib": 900.0,
    "shm_free_gib": 200.0,
    "shm_left_behind_gib": 0.0,
    "interfaces": ["lo", "eth0", "ib0"],
    "interface_variables": {},
    "own_address": "10.0.0.1",
    "environment_files": [],
}


def changed(**values: Any) -> dict[str, Any]:
    return {**copy.deepcopy(FACT), **values}


def failed(finding: Finding, *parts: str) -> None:
    """It failed, has a remedy, and its text has every part."""
    assert finding.failed
    assert finding.remedy
    for part in parts:
        assert part in finding.text, finding


def test_other_versions_are_named() -> None:
    versions = {"Python": "3.11.7", "torch": "2.12.0", "driver": None}
    verdicts = findings.check_versions({"a": FACT, "b": changed(versions=versions), "c": changed()})
    assert [verdict.failed for verdict in verdicts] == [False, True, False]
    failed(verdicts[1], "torch 2.12.0 (others: 2.13.0)", "driver None (others: 580.1)")


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        (FACT, None),
        (changed(devices=7), "7 GPUs for 8 slots"),
        (changed(devices=None), None),
        (changed(devices=None, cores=4), "4 cores for 8 slots"),
    ],
)
def test_devices_against_slots(fact: dict[str, Any], said: str | None) -> None:
    verdict = findings.check_devices(Host("a", 8, 1), fact)
    assert verdict.failed == (said is not None)
    assert said is None or verdict.text == said


def test_memory_and_disk() -> None:
    short = changed(memory_available_gib=3.0, shm_free_gib=0.0625)
    verdicts = findings.check_memory("a", short, least_gib=10)
    assert {v.check: v.failed for v in verdicts} == {
        "memory": True,
        "disk": False,
        "/dev/shm": True,
    }


def test_what_deepspeed_left_in_shared_memory(tmp_path: Path) -> None:
    used, ended = (tmp_path / f"deepspeed_allreduce_buffer_0_host_{port}_0" for port in (1, 2))
    for path in (used, ended):
        path.write_bytes(bytes(5000))
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert probe._left_behind_bytes(tmp_path) == 5000
    assert probe._left_behind_bytes(tmp_path) == 10000

    full = changed(shm_free_gib=0.5, shm_left_behind_gib=12.25)
    *_, verdict = findings.check_memory("a", full, least_gib=10)
    failed(verdict, "0.5 GiB, 12.2 GiB of DeepSpeed runs that ended")
    assert "find /dev/shm -name 'deepspeed_allreduce_buffer_*' -mmin +60 -delete" in verdict.remedy


@pytest.mark.parametrize(
    ("remote", "said"),
    [
        (100.5, None),
        (96.0, "4.0 s behind"),  # asked at 100, answered at 104
        (109.0, "5.0 s ahead"),
        (105.0, None),
    ],
)
def test_clock_skew(remote: float, said: str | None) -> None:
    verdict = findings.check_clock("a", remote, sent_at=100.0, received_at=104.0)
    assert verdict.failed == (said is not None)
    assert said is None or verdict.text == said


def test_interfaces() -> None:
    def checked(*, alone: bool = False, **values: Any) -> Finding:
        return findings.check_interface("a", changed(**values), is_only_host=alone)

    assert not checked().failed
    assert not checked(interface_variables={"NCCL_SOCKET_IFNAME": "ib"}).failed
    failed(checked(interface_variables={"GLOO_SOCKET_IFNAME": "eth7"}), "eth7", "eth0, ib0")
    # NCCL's exclusions and complete names.
    for value, is_usable in (
        ("^docker", True), ("^eth,lo", True), ("^eth,ib", False), ("=ib0", True), ("=ib", False),
        ("^=eth0", True), ("^=eth0,ib0", False),
    ):  # fmt: skip
        finding = checked(interface_variables={"NCCL_SOCKET_IFNAME": value})
        assert finding.failed is not is_usable, value
    failed(checked(own_address="127.0.1.1"), "its host name resolves to 127.0.1.1")
    failed(checked(own_address=None), "does not resolve")
    assert not checked(own_address="127.0.1.1", alone=True).failed
    named = {"GLOO_SOCKET_IFNAME": "eth0"}
    assert not checked(own_address="127.0.1.1", interface_variables=named).failed


def test_slow_device_of_unequal_hosts_is_named() -> None:
    devices = [{"local_rank": i, "matmul_seconds": 0.01} for i in (0, 0, 1, 0)]
    devices[2]["matmul_seconds"] = 0.02
    hosts = [Host("a", 1, 1), Host("b", 2, 2), Host("c", 1, 3)]
    verdicts = findings.check_compute(hosts, devices)
    assert [verdict.failed for verdict in verdicts] == [False, True, False]
    failed(verdicts[1], "device 1 takes 2.00 times the median")


def test_table_shows_every_failure_with_its_remedy() -> None:
    hosts = [Host("node-1", 8, 1), Host("node-2", 8, 2)]
    text = findings.render(
        hosts,
        [
            Finding("node-1", "reachable", "yes"),
            Finding("node-2", "reachable", "exit code 255: no route", "remove it"),
            Finding("node-1", "disk", "90.0 GiB"),
        ],
    )
    assert text.splitlines() == [
        "host    reachable  disk",
        "node-1  yes        90.0 GiB",
        "node-2  FAIL       -",
        "node-2: reachable: exit code 255: no route",
        "  -> remove it",
    ]


def test_facts_of_this_machine(tmp_path: Path) -> None:
    fact = probe.facts(str(tmp_path / "not" / "there"))
    assert set(FACT) <= set(fact)
    assert fact["cores"] >= 1
    assert fact["memory_available_gib"] > 0
    assert fact["versions"]["torch"]
    assert "lo" in fact["interfaces"]


def test_network_probes_meet(tmp_path: Path) -> None:
    ports = {"127.0.0.1": try_port(), "localhost": try_port()}
    results: dict[str, Any] = {}

    def one(me: str, other: str) -> None:
        results[me] = probe.network(ports[me], {other: ports[other]}, me, 30)

    threads = [
        threading.Thread(target=one, args=pair)
        for pair in (("127.0.0.1", "localhost"), ("localhost", "127.0.0.1"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: {"port": None, "unreachable": {}} for name in ports}


def test_port_that_is_taken_is_named() -> None:
    with socket.create_server(("", 0)) as holder:
        port = holder.getsockname()[1]
        result = probe.network(port, {}, "me", 1)
    verdict = findings.check_network("a", result, None)
    failed(verdict, f"port {port} cannot be used: Address already in use")


def test_a_probe_that_hangs_is_ended() -> None:
    host = Host("localhost", 1, 1)
    hangs = "import signal, time; signal.alarm(1); time.sleep(1000)"
    reply = ask_all([host], {"localhost": ["python3", "-c", hangs]}, "ssh", 1)["localhost"]
    assert reply.problem == "no answer within 1 s"


def test_doctor_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert bigtrain(["doctor", "--quick", "--least-gib", "0.01"]) == 0
    header, row, *_ = capsys.readouterr().out.splitlines()
    checks = ["reachable", "versions", "devices", "memory", "disk", "/dev/shm", "clock"]
    assert header.split() == ["host", *checks, "interface", ".deepspeed_env", "shared"]
    assert "FAIL" not in row
    assert list(tmp_path.iterdir()) == []  # nothing is left behind

    (tmp_path / ".deepspeed_env").write_text("HF_TOKEN=hf_geheim\n")
    (tmp_path / ".deepspeed_env").chmod(0o644)
    assert bigtrain(["doctor", "--quick", "--least-gib", "0.01"]) == 2
    said = capsys.readouterr().out
    assert "mode 644 lets others read HF_TOKEN" in said
    assert "hf_geheim" not in said


def test_a_grandchild_that_stays_does_not_keep_the_doctor() -> None:
    """It holds the command's output open, as workers of torchrun in sessions of their own do."""
    host = Host("localhost", 1, 1)
    leaves = "setsid sleep 30 & echo $! >&2; exit 3"
    reply = ask_all([host], {"localhost": ["sh", "-c", leaves]}, "ssh", 60)["localhost"]
    assert reply.problem is not None
    assert reply.problem.startswith("exit code 3: ")
    os.kill(int(reply.problem.removeprefix("exit code 3: ")), signal.SIGKILL)


@pytest.mark.slow
def test_a_directory_that_does_not_answer_holds_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a file server that is gone: to make a folder takes for ever in every process."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time; os.mkdir = lambda *_, **__: time.sleep(1000)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert bigtrain(["doctor", "--quick", "--least-gib", "0.01", "--seconds", "3"]) == 2
    said = f"{tmp_path}/runs cannot be written here: no answer within 3 s"
    assert said in capsys.readouterr().err
