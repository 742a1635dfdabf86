"""Who works on what: leases of living, dead and silent processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bigtrain.system.leases import LEASE_S, Leases, Owner
from tests.support.worlds import ROOT


def leases(directory: Path, token: str, cleaned: list[tuple[str, str]] | None = None) -> Leases:
    def clean(name: str, of_token: str) -> None:
        assert cleaned is not None, f"nobody died, but {name} of {of_token} is cleaned"
        cleaned.append((name, of_token))

    return Leases(directory, token, clean)


def write(directory: Path, age_s: float = 0.0, **changes: object) -> Path:
    """A claim on "unit" by this process but for `changes`, last touched `age_s` seconds ago."""
    path = directory / "unit.claim"
    path.write_text(json.dumps({**Owner.this_process("other").__dict__, **changes}))
    at = path.stat().st_mtime - age_s
    os.utime(path, (at, at))
    return path


def test_one_of_two_gets_it(tmp_path: Path) -> None:
    a, b = leases(tmp_path, "a"), leases(tmp_path, "b")
    with a.take("unit") as mine:
        assert mine
        assert a.is_live("unit")
        with b.take("unit") as others:
            assert not others
        with b.take("another") as mine_too:
            assert mine_too
    assert not b.is_live("unit")
    with b.take("unit") as now:
        assert now
    assert list(tmp_path.iterdir()) == []


def test_given_up_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), leases(tmp_path, "a").take("unit"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_of_a_process_that_was_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from bigtrain.system.leases import Leases\n"
        "with Leases(Path(sys.argv[1]), 'dead', None).take('unit'): os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment)
    assert killed.returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == ["unit.claim"]
    cleaned: list[tuple[str, str]] = []
    with leases(tmp_path, "a", cleaned).take("unit") as mine:
        assert mine
    assert cleaned == [("unit", "dead")]


def test_of_an_earlier_process_with_the_same_number(tmp_path: Path) -> None:
    write(tmp_path, started="1")
    cleaned: list[tuple[str, str]] = []
    with leases(tmp_path, "a", cleaned).take("unit") as mine:
        assert mine
    assert cleaned == [("unit", "other")]


@pytest.mark.parametrize("changes", [{}, {"machine": "elsewhere"}, {"machine": "x", "pid": 1}])
def test_of_a_process_that_may_live(tmp_path: Path, changes: dict[str, object]) -> None:
    """It is silent for too long by the file system's clock, or it is left alone."""
    write(tmp_path, LEASE_S / 2, **changes)
    a = leases(tmp_path, "a")
    assert a.is_live("unit")
    with a.take("unit") as mine:
        assert not mine
    write(tmp_path, LEASE_S + 1, **changes)
    assert not a.is_live("unit")
    with a.take("unit") as mine:  # and its files stay, for it may go on
        assert mine


def test_without_content(tmp_path: Path) -> None:
    """What a file system without hard links leaves of a process killed in the middle."""
    write(tmp_path).write_bytes(b"")
    a = leases(tmp_path, "a")
    assert a.is_live("unit")
    write(tmp_path, LEASE_S + 1)
    with a.take("unit") as mine:
        assert mine


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    test_one_of_two_gets_it(tmp_path)


def test_it_beats_while_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigtrain.system.leases.HEARTBEAT_S", 0.001)
    a = leases(tmp_path, "a")
    with a.take("unit"):
        path = tmp_path / "unit.claim"
        os.utime(path, (1.0, 1.0))
        while path.stat().st_mtime == 1.0:
            pass
        assert a.is_live("unit")
        path.unlink()  # taken over: nothing is made anew


def test_released_by_who_knows_of_the_death(tmp_path: Path) -> None:
    write(tmp_path)
    cleaned: list[tuple[str, str]] = []
    a = leases(tmp_path, "a", cleaned)
    a.release({"somebody"})
    assert a.is_live("unit")
    a.release({"other"})
    assert not a.is_live("unit")
    assert cleaned == [("unit", "other")]
