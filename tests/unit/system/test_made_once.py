"""What many processes want at once is made by one of them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import pytest

from bigtrain.system import user_cache as module
from bigtrain.system.leases import Leases
from bigtrain.system.user_cache import cached, made_once

WANTED = b"wanted"


def read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return content if content == WANTED else None


class Maker:
    """Writes what is wanted, and counts how often."""

    def __init__(self, content: bytes = WANTED) -> None:
        self.content = content
        self.num_calls = 0

    def __call__(self, file: IO[bytes]) -> None:
        self.num_calls += 1
        file.write(self.content)


def test_it_is_read_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "second").write_bytes(WANTED)
    maker = Maker()
    assert made_once([tmp_path / "first", tmp_path / "second"], read, maker) == WANTED
    assert maker.num_calls == 0
    assert [path.name for path in tmp_path.iterdir()] == ["second"]


def test_threads_and_processes_make_it_once(tmp_path: Path) -> None:
    """Ten at once, of which the first to come makes it while all others wait."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from bigtrain.system.user_cache import made_once\n"
        "place, made = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "def make(file):\n"
        "    with made.open('a') as log: log.write('made\\n')\n"
        "    file.write(b'wanted')\n"
        "def read(path):\n"
        "    return path.read_bytes() if path.exists() else None\n"
        "assert made_once([place], read, make) == b'wanted'\n"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "cache/x"), str(tmp_path / "made")]
    processes = [subprocess.Popen(arguments) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert (tmp_path / "made").read_text() == "made\n"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["x"]


def test_others_wait_for_a_living_maker(tmp_path: Path) -> None:
    place, maker, values = tmp_path / "x", Maker(), []
    held = Leases(tmp_path, "other", lambda _name, _token: None)
    with held.take("x") as mine:
        assert mine
        waiting = threading.Thread(target=lambda: values.append(made_once([place], read, maker)))
        waiting.start()
        place.write_bytes(WANTED)
        waiting.join()
    assert values == [WANTED]
    assert maker.num_calls == 0


def test_a_dead_maker_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_FOR_MAKER_SECONDS", 0.05)
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from bigtrain.system.leases import Leases\n"
        "lease = Leases(Path(sys.argv[1]), 'dead', print).take('x')\n"
        "assert lease.__enter__()\n"
        "os._exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert (tmp_path / "x.claim").exists()
    maker = Maker()
    assert made_once([tmp_path / "x"], read, maker) == WANTED
    assert maker.num_calls == 1


def test_a_place_that_cannot_be_written_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    places = [tmp_path / "file" / "x", tmp_path / "there" / "x"]
    assert made_once(places, read, Maker()) == WANTED
    assert places[1].read_bytes() == WANTED
    places[1].write_bytes(b"torn")
    assert made_once(places, read, Maker()) == WANTED
    assert made_once(places[:1], read, Maker()) is None


def test_what_fails_leaves_nothing_and_the_next_one_tries_again(tmp_path: Path) -> None:
    def fail(file: IO[bytes]) -> None:
        file.write(b"half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        made_once([tmp_path / "x"], read, fail)
    assert list(tmp_path.iterdir()) == []
    assert made_once([tmp_path / "x"], read, Maker()) == WANTED


def test_a_fact_is_found_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGTRAIN_CACHE", str(tmp_path))
    calls: list[int] = []

    def find() -> dict[str, int]:
        calls.append(1)
        return {"fact": 7}

    assert [cached("kind", "key", find) for _ in range(3)] == [{"fact": 7}] * 3
    assert len(calls) == 1
    monkeypatch.setenv("BIGTRAIN_CACHE", os.devnull)
    assert cached("kind", "key", find) == {"fact": 7}
    assert len(calls) == 2
