"""An outer server that is killed at chosen operations and started again, and its full disk."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.parent_death import lasting_parent
from tests.support.worlds import ROOT, free_port

HERE = Path(__file__).parent


def system_calls(directory: Path) -> Path:
    """Return the compiled `system_calls.c`; skips the test where there is no compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("cc is not installed: make test-deps")
    library = directory / "system_calls.so"
    source = HERE / "system_calls.c"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library


class ServerLives:
    """One server of `directory` after the other, on one port."""

    def __init__(self, directory: Path, window_seconds: float = 1000.0) -> None:
        directory.mkdir()
        self.directory, self.port = directory, free_port()
        self.log = directory / "server.log"
        self.full = directory / "full"
        self.num_kills = 0
        self.num_operations = 0  # of the last life that was not killed
        self._request = {
            "directory": str(directory / "state"),
            "port": self.port,
            "window_seconds": window_seconds,
        }
        self._ended = threading.Event()
        self._pid = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def running(self, kill_at: Callable[[int], int]) -> Iterator[None]:
        """Run servers until the end of the block. kill_at: the operation at which the next one is
        killed, by the number of kills before; 0: none."""
        library = system_calls(self.directory)
        environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "PYTHONPATH": str(ROOT),
            "TEST_DISK_FULL": str(self.full),
        }
        script = [sys.executable, str(HERE / "fork_outer_server.py"), str(lasting_parent())]
        with self.log.open("ab") as log:
            forks = subprocess.Popen(
                script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
            )
        thread = threading.Thread(target=self._live, args=(forks, kill_at))
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            while thread.is_alive():
                with suppress(ProcessLookupError):  # ended meanwhile
                    if self._pid:
                        os.kill(self._pid, signal.SIGTERM)
                thread.join(0.2)
            forks.communicate(timeout=20)

    def _live(self, forks: subprocess.Popen[bytes], kill_at: Callable[[int], int]) -> None:
        assert forks.stdin is not None
        assert forks.stdout is not None
        while not self._ended.is_set():
            request = {**self._request, "kill_at": kill_at(self.num_kills)}
            forks.stdin.write(f"{json.dumps(request)}\n".encode())
            forks.stdin.flush()
            self._pid = int(forks.stdout.readline())
            answer = json.loads(forks.stdout.readline())
            self._pid = 0
            if answer["code"] == -signal.SIGKILL:
                self.num_kills += 1
            else:
                assert self._ended.is_set(), self.log.read_text()[-3000:]
                self.num_operations = answer["count"]


def random_kills(number: int, most: int, seed: int) -> Callable[[int], int]:
    """Kills at random operations up to `most`, so many times."""
    chosen = random.Random(seed)
    return lambda num_kills: chosen.randint(1, most) if num_kills < number else 0
