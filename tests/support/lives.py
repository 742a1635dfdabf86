"""Worlds of train.py or of a script that are forked, so that they cost no imports."""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import psutil

from bigtrain.errors import LaunchError
from tests.support.parent_death import lasting_parent
from tests.support.worlds import ROOT, free_port

SHOWN_CHARACTERS = 6000
LIMIT_SECONDS = 300.0
"""For one answer: the first life may compile DeepSpeed's operators, the others take seconds."""


class Server:
    """`fork_server.py`, and what it is asked for.

    Without an answer within `LIMIT_SECONDS` the test fails with what the processes were doing, and
    the next one has a new server: it would wait for the answer to this one's request.
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str] | None = None,
        checkout: Path = ROOT,
    ) -> None:
        """`directory`: for the output of the worlds. `environment`: added to this process's.
        `checkout`: whose bigtrain is run, in that folder."""
        self.directory, self.checkout = directory, checkout
        self.num_lives = 0
        own = {"PYTHONPATH": str(checkout), **(environment or {})}
        self._environment = {**_environment(), **own}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                *(sys.executable, str(self.checkout / "tests/support/fork_server.py")),
                str(lasting_parent()),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # `select` does not see what a buffer holds
            cwd=self.checkout,
            env=self._environment,
            start_new_session=True,
        )

    def close(self) -> None:
        """End the server and all that it has started."""
        self._signal(signal.SIGKILL)
        self.process.communicate()

    def live(
        self,
        arguments: list[str],
        *,
        die: tuple[int, int] | None = None,
        send: dict[str, Any] | None = None,
        full_disk: dict[str, int] | None = None,
        world_size: int = 2,
        limit_seconds: float = LIMIT_SECONDS,
        **more: Any,
    ) -> tuple[list[int], str]:
        """Start train.py on so many processes; exit codes by rank, and what they printed.

        Possible events are described in `fork_server.py`.
        """
        request = self._request(arguments) | {"die": die, "send": send, "full_disk": full_disk}
        request |= {"world_size": world_size, **more}
        self._write(json.dumps(request))
        return self._codes(limit_seconds), Path(request["output"]).read_text()

    def overtake(
        self,
        arguments: list[str],
        *,
        during: bool,
        before_it_goes_on: Callable[[], None],
    ) -> tuple[list[int], str, list[int], str]:
        """Return a world that is stopped when it has begun to write, so that a second one takes its
        run.

        It continues after the second has ended and `before_it_goes_on` was called, or `during` it.
        Codes and text of the second one, then of the first.
        """
        older, newer = self._request(arguments), self._request(arguments)
        older["overtaken"] = {"request": newer, "during": during}
        self._write(json.dumps(older))
        codes = [self._codes()]
        if not during:
            before_it_goes_on()
            self._write("")
        codes.append(self._codes())
        if during and codes[0] != [0, 0]:
            codes.reverse()  # whichever ended first
        newer_text, older_text = (Path(life["output"]).read_text() for life in (newer, older))
        return codes[0], newer_text, codes[1], older_text

    def _request(self, arguments: list[str]) -> dict[str, Any]:
        self.num_lives += 1
        return {
            "world_size": 2,
            "arguments": arguments,
            "output": str(self.directory / f"life-{self.num_lives:04d}.txt"),
            "port": free_port(),
            "die": None,
            "send": None,
            "full_disk": None,
        }

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())

    def _codes(self, limit_seconds: float = LIMIT_SECONDS) -> list[int]:
        assert self.process.stdout is not None
        answers, _, _ = select.select([self.process.stdout], [], [], limit_seconds)
        if not answers:
            self._give_up(limit_seconds)
        answer = self.process.stdout.readline()
        assert answer, "the server is gone"
        codes: list[int] = json.loads(answer)
        return codes

    def _give_up(self, limit_seconds: float) -> NoReturn:
        # The newest two: a world may have been overtaken by another.
        outputs = sorted(self.directory.glob("life-*.txt"))[-2:]
        worlds = psutil.Process(self.process.pid).children(recursive=True)
        self._signal(signal.SIGABRT)  # which each process answers by what its threads do
        self._signal(signal.SIGCONT)
        psutil.wait_procs(worlds, timeout=10)
        self.close()
        self.process = self._start()
        texts = "".join(f"\n{path.name}:\n{path.read_text()[-20000:]}" for path in outputs)
        raise AssertionError(f"no answer within {limit_seconds} s{texts}")

    def _signal(self, number: signal.Signals) -> None:
        """To the server and all that it has started."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return


@cache
def shared_server() -> Server:
    """Return the server of this test process: started when first asked for, ended with the
    process."""
    directory = Path(tempfile.mkdtemp(prefix="bigtrain-lives-"))
    # Of Hugging Face nothing that this machine's user has.
    server = Server(directory, {"HF_HOME": str(directory / "home")})
    atexit.register(shutil.rmtree, server.directory, ignore_errors=True)
    atexit.register(server.close)
    return server


def run_script(
    world_size: int, script: Path, *arguments: object, timeout_seconds: float = 900
) -> str:
    """Run a Python script in `world_size` forked processes; returns their joined output."""
    return run_forked_world(world_size, [str(script), *map(str, arguments)], {}, timeout_seconds)


def run_forked_world(
    world_size: int,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    timeout_seconds: float = 900,
) -> str:
    """Run a world like `bigtrain.system.local_world.run_local_world`, without import time.

    Tests that need processes as a launcher starts them (memory, imports) use that one.
    """
    codes, output = shared_server().live(
        [],
        world_size=world_size,
        script=list(arguments),
        environment=dict(environment),
        limit_seconds=timeout_seconds,
    )
    if codes != [0] * world_size:
        raise LaunchError(f"exit codes {codes}:\n{_shown(output)}")
    return output


def _shown(output: str) -> str:
    """Return the first error, which may have ended the other ranks, and the end."""
    first = output.find("Traceback (most recent call last)")
    if first < 0 or len(output) - first <= 2 * SHOWN_CHARACTERS:
        return output[-2 * SHOWN_CHARACTERS :]
    return f"{output[first : first + SHOWN_CHARACTERS]}\n...\n{output[-SHOWN_CHARACTERS:]}"


def _environment() -> dict[str, str]:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return {key: value for key, value in os.environ.items() if key not in launcher}
