"""Starts outer servers by forking, so that a life of one costs no imports.

Reads one JSON object per line: the directory, the port, and the operation on files or connections
at which the server is killed (0: none; `system_calls.c`). Answers with its process id, and with the
exit code and the number of operations when it has ended. SIGTERM to the server ends it. Argument:
the process to end with, see `parent_death`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from bigtrain.sites.server.app import Place, serve
from bigtrain.sites.server.members import Rules
from tests.support.parent_death import die_with_parent

TOKEN = b"0123456789abcdef0123456789abcdef"


def child(request: dict[str, int | str], lives: int, server: int) -> None:
    die_with_parent(server)
    calls = ctypes.CDLL(None)
    calls.test_count.restype = ctypes.c_long
    os.dup2(2, 1)
    calls.test_arm(ctypes.c_long(int(request["kill_at"])))
    place = Place("127.0.0.1", int(request["port"]))
    rules = Rules(False, float(request["window_seconds"]))
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn sends it again when it has ended

    def say(text: str) -> None:
        print(text, flush=True)

    try:
        serve(Path(str(request["directory"])), place, TOKEN, rules, say)
    finally:
        os.write(lives, calls.test_count().to_bytes(8, "little"))
        os._exit(0)


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    server = os.getpid()
    answers = os.dup(1)
    for line in sys.stdin:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            child(json.loads(line), write, server)
        os.close(write)
        os.write(answers, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        count = int.from_bytes(os.read(read, 8), "little")
        os.close(read)
        answer = {"code": os.waitstatus_to_exitcode(status), "count": count}
        os.write(answers, f"{json.dumps(answer)}\n".encode())


if __name__ == "__main__":
    main()
