"""Operators that are compiled at first use: killed makers, several paths, several environments.

The operator here is a small one, and the compiler the real one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.worlds import ROOT

pytestmark = pytest.mark.timeout(120)

SOURCE = """\
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "small", 0, -1, 0};
PyMODINIT_FUNC PyInit_small() {
  PyObject *module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "answer", ANSWER);
  return module;
}
"""
# Forks for every line that it reads, so that a load costs no imports.
LOADER = """\
import os, sys
from deepspeed.ops.op_builder.builder import OpBuilder
from bigtrain.engine.startup.operators import operators_without_locks

class Small(OpBuilder):
    def __init__(self): super().__init__(name="small")
    def absolute_name(self): return "small"
    def sources(self): return [source]
    def include_paths(self): return []
    def cxx_args(self): return [f"-DANSWER={answer}"]
    def is_compatible(self, verbose=False): return True

print("ready", flush=True)
for line in sys.stdin:
    source, answer = line.split()
    pid = os.fork()
    if pid == 0:
        with operators_without_locks():
            print(os.getpid(), "has", Small().load(verbose=False).answer, flush=True)
        os._exit(0)
    print(pid, flush=True)
"""
# Says that it was called, and waits, where it is told to, until a pipe is closed.
COMPILER = """\
#!/bin/bash
if [[ "$*" = *"small.cpp -o"* ]]; then
  echo compiled >> "$COUNT"
  if [ -p "$HOLD" ]; then read -r _ < "$HOLD"; fi
fi
exec c++ "$@"
"""


class Loader:
    """Processes that load the operator, of a compiler that counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "small.cpp").write_text(SOURCE)
        compiler = folder / "compiler"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        own = {"CXX": compiler, "COUNT": folder / "count", "HOLD": folder / "hold"}
        own |= {"TORCH_EXTENSIONS_DIR": folder / "operators", "PYTHONPATH": ROOT}
        self._process = subprocess.Popen(
            [sys.executable, "-c", LOADER],
            env={**os.environ, **{name: str(value) for name, value in own.items()}},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        while self.line() != "ready":  # DeepSpeed talks while it is imported
            pass

    def begin(self, source: Path, answer: int = 1) -> int:
        """A process of its own that loads the operator; its number."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{source} {answer}\n")
        self._process.stdin.flush()
        return int(self.line())

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def answer(self, source: Path, answer: int = 1) -> int:
        pid = self.begin(source, answer)
        who, _, value = self.line().split()
        assert int(who) == pid
        return int(value)

    def num_compiled(self) -> int:
        return len((self.folder / "count").read_text().split())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def loader(tmp_path: Path) -> Iterator[Loader]:
    running = Loader(tmp_path)
    yield running
    running.close()


@pytest.mark.slow
def test_a_start_outlives_those_that_were_killed(loader: Loader) -> None:
    """One in the middle of compiling, while another waits for it; and in the middle of loading."""
    folder, source = loader.folder, loader.folder / "small.cpp"
    os.mkfifo(folder / "hold")
    first = loader.begin(source)
    hold = os.open(folder / "hold", os.O_WRONLY)  # once its compiler has begun
    second = loader.begin(source)
    os.kill(first, signal.SIGKILL)
    (folder / "hold").unlink()
    os.close(hold)
    assert loader.line() == f"{second} has 1"
    assert loader.num_compiled() == 2
    # What torch leaves of whoever is killed inside of its own lock, here and in other programs.
    for name in ("small", "deepspeed_shm_comm"):
        (folder / "operators" / name).mkdir()
        (folder / "operators" / name / "lock").touch()
    assert loader.answer(source) == 1
    assert loader.num_compiled() == 2
    (built,) = (folder / "operators" / "bigtrain").iterdir()
    assert sorted(path.name for path in built.iterdir()) == ["flock", "small.so"]


@pytest.mark.slow
def test_paths_share_a_build_and_environments_have_their_own(loader: Loader) -> None:
    """An environment is another if its sources or flags are; back in the first, all is there."""
    source = loader.folder / "small.cpp"
    assert loader.answer(source) == 1
    (loader.folder / "alias").symlink_to(loader.folder, target_is_directory=True)
    assert loader.answer(loader.folder / "alias" / "small.cpp") == 1
    assert loader.num_compiled() == 1
    other = loader.folder / "other" / "small.cpp"
    other.parent.mkdir()
    other.write_text(SOURCE.replace("ANSWER);", "10 * ANSWER);"))
    assert loader.answer(other) == 10
    assert loader.answer(other, 2) == 20
    assert loader.num_compiled() == 3
    assert loader.answer(source) == 1
    assert loader.answer(other) == 10
    assert loader.num_compiled() == 3
