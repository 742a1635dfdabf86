"""Thousands of hosts: asked some at a time, told as they answer, names looked up side by side."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from bigtrain.cli import main as bigtrain
from bigtrain.commands import hostfile
from bigtrain.launchers.doctor.examination import _groups
from bigtrain.launchers.doctor.transport import MOST_AT_ONCE, ask_all, most_at_once
from bigtrain.launchers.hostfile import Host

FAKE_SSH = """\
#!/bin/sh
# ssh -o ... -- HOST COMMAND: here, but for hosts that are gone.
while [ "$1" != -- ]; do shift; done
case "$2" in gone*) echo "No route to host" >&2; exit 255;; esac
exec sh -c "$3"
"""


@pytest.fixture
def few_files(fake_ssh: None) -> Iterator[None]:
    """As where `ulimit -n` is small: more hosts than files that can be opened yet."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 50, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on this machine what would go to another."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ssh"
    program.write_text(FAKE_SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")


def names(count: int) -> list[Host]:
    return [Host(f"n{number}", 1, number + 1) for number in range(count)]


@pytest.mark.usefixtures("few_files")
def test_more_hosts_than_open_files_are_all_asked() -> None:
    assert most_at_once() < 10
    hosts = [*names(150), Host("gone", 1, 151)]
    mark = "echo 'BIGTRAIN-PROBE 1'"
    told = []
    replies = ask_all(
        hosts,
        {host.name: ["sh", "-c", mark] for host in hosts},
        "ssh",
        60,
        lambda host, _reply: told.append(host.name),
    )
    assert list(replies) == [host.name for host in hosts]
    assert sorted(told) == sorted(replies)
    assert [name for name, reply in replies.items() if reply.problem] == ["gone"]
    assert replies["gone"].problem == "exit code 255: No route to host"


@pytest.mark.usefixtures("few_files")
def test_the_doctor_tells_who_is_gone_as_it_finds_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    lines = ["localhost slots=1", *(f"gone{number} slots=1" for number in range(200))]
    (tmp_path / "hosts").write_text("\n".join(lines) + "\n")
    words = ["doctor", "--hostfile", str(tmp_path / "hosts"), "--quick", "--least-gib", "0.01"]
    assert bigtrain(words) == 2
    said = capsys.readouterr()
    assert said.err.count("exit code 255: No route to host") == 200
    assert "128 of 201 hosts probed" in said.err
    rows = [line for line in said.out.splitlines() if line.startswith("gone") and "FAIL" in line]
    assert len(rows) == 200


def test_groups_share_a_host_and_leave_nobody_out() -> None:
    assert most_at_once() == MOST_AT_ONCE
    hosts = names(4096)
    groups = _groups(hosts)
    assert groups[0][0] is hosts[0]
    assert groups[-1][-1] is hosts[-1]
    assert all(1 < len(group) <= MOST_AT_ONCE for group in groups)
    assert all(a[-1] is b[0] for a, b in pairwise(groups))
    assert _groups(hosts[:100]) == [hosts[:100]]


def test_names_are_looked_up_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of fifty is answered before all of them are asked."""
    asked = []
    fifty = threading.Barrier(50, timeout=60)

    def look_up(name: str) -> bool:
        asked.append(name)
        fifty.wait()
        return name != "n7"

    monkeypatch.setattr(hostfile, "_has_address", look_up)
    monkeypatch.setattr(hostfile, "ssh_settings_name_hosts", lambda: False)
    (problem,) = hostfile._unresolved_names(names(2000))
    assert problem.startswith("line 8: n7: this host name")
    assert len(asked) == 2000


@pytest.mark.parametrize(
    ("config", "included", "expected"),
    [
        ("Host *\n  User me\n", "", False),
        ("Host n*\n  HostName %h.cluster\n", "", True),
        ("Host n*\n  hostname=%h.cluster\n", "", True),
        ("Include more/*\n", "Host *\n CanonicalizeHostname yes\n", True),
        ("Include more/*\n", "Host *\n Port 2222\n", False),
    ],
)
def test_ssh_is_asked_for_names_only_where_its_settings_have_any(
    config: str, included: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh/more").mkdir(parents=True)
    (tmp_path / ".ssh/config").write_text(config)
    (tmp_path / ".ssh/more/one").write_text(included)
    hostfile.ssh_settings_name_hosts.cache_clear()
    assert hostfile.ssh_settings_name_hosts() is expected
    hostfile.ssh_settings_name_hosts.cache_clear()
