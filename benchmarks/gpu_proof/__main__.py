"""Trace the cases of `make gpu-proof`, each in a process of its own, and print what they did."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_proof.cases import CASES, Case

ROOT = Path(__file__).resolve().parents[2]


def trace_apart(cases: Sequence[Case]) -> Iterator[tuple[Case, dict[str, Any] | str, float]]:
    """Yield every case with what it did, or its error's last lines, and its seconds: traced in
    processes that one process, which has imported everything, forks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu_proof", "--serve"]
    server = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    with server:
        for case in cases:
            begun = time.monotonic()
            server.stdin.write(f"{case.name}\n")
            server.stdin.flush()
            answer: dict[str, Any] | str = json.loads(server.stdout.readline())
            yield case, answer, time.monotonic() - begun
        server.stdin.close()


def _serve() -> None:
    """Fork a process for each case named on the standard input; print its result as a line of
    JSON."""
    from benchmarks.gpu_proof.fake_cuda import load_before_torch

    load_before_torch()
    from benchmarks.gpu_proof.step import as_json, trace_case

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    cases = {case.name: case for case in CASES}
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as result:
            child = os.fork()
            if child == 0:
                try:
                    result.write(as_json(trace_case(cases[line.strip()])))
                except BaseException:
                    result.write(json.dumps("\n".join(traceback.format_exc().splitlines()[-12:])))
                result.flush()
                os._exit(0)  # threads of the fake process group do not end
            os.waitpid(child, 0)
            result.seek(0)
            answers.write((result.read() or json.dumps("its process died")) + "\n")
            answers.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Trace all cases, or those whose name contains a word. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="gpu_proof", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        _serve()
        return 0
    failed = 0
    for case, traced, seconds in trace_apart([case for case in CASES if args.only in case.name]):
        if isinstance(traced, str):
            failed += 1
            print(f"{case.name}: FAILED\n{traced}", flush=True)
            continue
        step = traced["step"]
        print(f"{case.name}: {seconds:.1f} s")
        print(f"  peak {step['peak'] / 2**20:.1f} MiB, planner {traced['predicted'] / 2**20:.1f}")
        for name in ("step", "logged", "evaluation"):
            for place, count in traced[name]["waits"].items():
                print(f"  {name} waits {count} x: {place}")
        for operation, size, dtype, count in step["exchanged"]:
            print(f"  {operation} of {size} ranks: {count:,} {dtype}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
