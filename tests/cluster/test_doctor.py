"""`bigtrain doctor` on real hosts, sound and broken, over ssh and in a Slurm job."""

from __future__ import annotations

import re

import pytest

from tests.cluster.conftest import COMMON, Lab
from tests.support.cluster import BINARIES, wait_until
from tests.support.worlds import ROOT

pytestmark = pytest.mark.slow

DOCTOR = (BINARIES / "python", "-m", "bigtrain.cli", "doctor", "--least-gib", "0.01")


def cells(output: str) -> dict[str, dict[str, str]]:
    """The table, by host and check; cells hold two spaces between them and never within."""
    lines = [line for line in output.splitlines() if "  " in line.strip()]
    header = next(i for i, line in enumerate(lines) if line.startswith("host "))
    names = [name for name in lines[header].split("  ") if name]
    table = {}
    for line in lines[header + 1 :]:
        values = [value.strip() for value in line.split("  ") if value]
        if len(values) == len(names):
            table[values[0]] = dict(zip(map(str.strip, names[1:]), values[1:], strict=True))
    return table


def test_sound_hosts_compute_and_communicate(lab: Lab) -> None:
    (lab.folder / "hosts").write_text("n1 slots=2\nn2 slots=1\n")
    code, output = lab.run("n1", *DOCTOR, "--hostfile", "hosts", "--seconds", "200")
    table = cells(output)
    assert set(table) == {"n1", "n2"}, output
    for host in table.values():
        # Two hosts share the cores of this machine, so one may well be slower.
        assert {name for name, text in host.items() if text == "FAIL"} <= {"compute"}, output
        assert host["network"] == "reaches all"
        assert host["interface"].startswith("10.77.0.")
    for where in ("within each host", "over all hosts"):
        assert re.search(rf"(?m)^all-reduce {where}: \d+ us, \d+\.\d+ GB/s$", output), output
    assert "\nn2 has slots=1, most hosts 2\n" in output
    assert code in (0, 2)
    assert not (lab.folder / "runs").exists()


# /run belongs to each host. Nobody but the machine sets its clock, so n2's is Python's own.
ANOTHER_HOST = r"""
mkdir -p /run/other/torch-1.0.dist-info
printf 'Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n' >/run/other/torch-1.0.dist-info/METADATA
echo 'import time; right = time.time; time.time = lambda: right() + 90' >/run/other/sitecustomize.py
"""


def test_what_is_broken_is_named_by_host(lab: Lab) -> None:
    """n0 cannot be reached; n2 has another torch, a port in use, and does not share the folder."""
    (lab.folder / "hosts").write_text("n1 slots=1\nn2 slots=1\nn0 slots=1\n")
    code, output = lab.run("n2", "sh", "-c", ANOTHER_HOST)
    assert code == 0, output
    listen = "import socket, time; s = socket.create_server(('', 29777)); print(1); time.sleep(900)"
    holder = lab.cluster.start("n2", "python3", "-uc", listen, cwd=lab.folder)
    assert holder.stdout.readline() == "1\n"
    (lab.folder / ".deepspeed_env").write_text("HF_TOKEN=hf_geheim\n")
    (lab.folder / ".deepspeed_env").chmod(0o644)
    lab.cluster.link("n0", "down")
    options = ["--hostfile", "hosts", "--port", "29777", "--directory", "/run/doctor/runs"]
    options += ["--quick", "--seconds", "24"]
    path = {**COMMON, "PYTHONPATH": f"{ROOT}:/run/other"}
    code, output = lab.cluster.run("n1", *DOCTOR, *options, cwd=lab.folder, **path)
    assert code == 2, output
    table = cells(output)
    assert table["n0"]["reachable"] == "FAIL"
    failing = {h: {n for n, text in row.items() if text == "FAIL"} for h, row in table.items()}
    assert failing["n2"] >= {"versions", "clock", "network", "shared"}, output
    assert not failing["n1"] & {"clock", "shared"}, output
    assert "torch 1.0 (others: " in output or "(others: 1.0)" in output
    assert re.search(r"n2: clock: (8\d|90)\.\d s ahead", output), output
    assert "n2: network: port 29777 cannot be used: Address already in use" in output
    assert "n2: shared: does not see the file that this machine wrote there" in output
    assert "lets others read HF_TOKEN" in output
    assert "hf_geheim" not in output
    assert output.count("\n  -> ") == output.count("FAIL"), output  # a remedy for each


def test_in_a_slurm_job(lab: Lab, nodes: None) -> None:
    log = lab.folder / "doctor.log"
    doctor = " ".join(map(str, (*DOCTOR, "--slurm", "--quick")))
    options = ["--nodes=2", "--gpus-per-node=1", "--mem=500", "--time=5", f"--output={log}"]
    code, output = lab.run("n0", "sbatch", "--wait", *options, f"--wrap={doctor}")
    wait_until("the log is written", lambda: log.exists() and "host " in log.read_text())
    table = cells(log.read_text())
    assert set(table) == {"n1", "n2"}
    assert {text for row in table.values() for text in row.values()} & {"FAIL"} == set()
    assert code == 0, output + log.read_text()
