"""Many `bigtrain` commands as processes of their own, without paying each time for imports.

A server process imports the libraries once and forks a child for every command, before any of them
has started a thread. A child leads a process group of its own, so that SIGKILL can be sent to it
and all its workers; it can also kill itself just before its n-th change of a directory
or sync of a file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tests.support.parent_death import die_with_parent, lasting_parent

ROOT = Path(__file__).resolve().parents[2]
STEPS = ("link", "mkdir", "rename", "rmdir", "unlink", "fsync")


@dataclass(frozen=True)
class Ended:
    """Result of a command: exit code (negative: signal), output, peak memory in bytes.

    `steps`: the file-system steps it took, where they were counted.
    """

    code: int
    output: str
    peak_bytes: int
    steps: list[str]


class Commands:
    """Starts commands; a context manager that ends the server."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._number = 0
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(lasting_parent())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        with self._server:
            self._server.kill()

    def start(
        self,
        *words: object,
        environment: Mapping[str, str] | None = None,
        kill_before_step: int | None = None,
    ) -> Running:
        """Return `bigtrain WORDS`, in a process group of its own."""
        self._number += 1
        log = self.directory / f"command-{self._number}"
        pid = self._ask(
            start=[str(word) for word in words],
            environment=dict(environment or {}),
            kill_before_step=kill_before_step,
            log=str(log),
        )
        return Running(self, pid, log)

    def run(self, *words: object, **how: Any) -> Ended:
        """Start a command like `start`, and wait for its end."""
        return self.start(*words, **how).wait()

    def _ask(self, **request: Any) -> Any:
        assert self._server is not None
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())


@dataclass
class Running:
    """A command that was started; `wait` must be called."""

    commands: Commands
    pid: int
    log: Path

    def wait(self) -> Ended:
        """Until it has ended."""
        code, peak_bytes = self.commands._ask(wait=self.pid)
        steps = self.log.with_suffix(".steps")
        return Ended(
            code,
            self.log.read_text(),
            peak_bytes,
            steps.read_text().splitlines() if steps.exists() else [],
        )

    def kill(self) -> Ended:
        """Kill it and all its workers, if it still runs."""
        os.killpg(self.pid, signal.SIGKILL)
        return self.wait()

    def has_ended(self) -> bool:
        """Return whether it is a zombie that nobody waited for yet."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _serve() -> None:
    die_with_parent(int(sys.argv[1]))
    server = os.getpid()
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    import bigtrain.commands.tokenize
    import bigtrain.data.tokenize_job.job  # noqa: F401

    while line := sys.stdin.readline():
        request = json.loads(line)
        if "wait" in request:
            _, status, usage = os.wait4(request["wait"], 0)
            answer: Any = [os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024]
        else:
            answer = os.fork()
            if answer == 0:
                _become(request, server)
            os.waitid(os.P_PID, answer, os.WSTOPPED | os.WNOWAIT)
            os.kill(answer, signal.SIGCONT)
        print(json.dumps(answer), flush=True)


def _become(request: dict[str, Any], server: int) -> None:
    """Run the command in the child; never returns."""
    die_with_parent(server)
    code = 70
    try:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.kill(os.getpid(), signal.SIGSTOP)  # the server waits for this: the group exists now
        os.environ.update(request["environment"])
        from bigtrain.cli import main

        if request["kill_before_step"] is not None:
            _count_steps(request["kill_before_step"], Path(request["log"]).with_suffix(".steps"))
        code = main(request["start"])
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _count_steps(last: int, path: Path) -> None:
    """Write down every step, and die just before number `last` (0: never)."""
    file: IO[str] = path.open("w")
    count = 0

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            print(name, *(str(a) for a in arguments), file=file, flush=True)
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **keywords)

        return step

    for name in STEPS:
        setattr(os, name, counted(name, getattr(os, name)))


if __name__ == "__main__":
    _serve()
