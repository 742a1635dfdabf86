"""Trace the cases of `make gpu-proof`, each in a process of its own, and compare them with the
planner and with docs/gpu_proof.md."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_proof.cases import CASES, Case
from benchmarks.gpu_proof.fake_cuda import load_before_torch, why_not

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gpu_proof.md"
MARKER = "<!-- written by make gpu-proof -->"


def trace_apart(cases: Sequence[tuple[Case, str]]) -> Iterator[tuple[Case, dict[str, Any] | str]]:
    """Yield every case with what it did, or its error's last lines: traced in processes that one
    process, which has imported everything, forks. cases: each with one of `step.FAULTS` to plant,
    or an empty text."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu_proof", "--serve"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for case, fault in cases:
            server.stdin.write(f"{case.name}\t{fault}\n")
            server.stdin.flush()
            answer = server.stdout.readline()
            yield case, json.loads(answer) if answer else "the process that traces has ended"
        server.stdin.close()


def _serve() -> None:
    """Fork a process for each case named on the standard input; print its result as a line of
    JSON."""
    load_before_torch()
    from benchmarks.gpu_proof import step  # noqa: F401  (imported once, before forks)

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    cases = {case.name: case for case in CASES}
    for line in sys.stdin:
        name, _, fault = line.rstrip("\n").partition("\t")
        with tempfile.TemporaryFile("w+") as result:
            child = os.fork()
            if child == 0:
                answer = _answer(cases[name], fault)
                if answer is not None:
                    result.write(answer)
                    result.flush()
                os._exit(0)  # threads of the fake process group do not end
            os.waitpid(child, 0)
            result.seek(0)
            answers.write((result.read() or json.dumps("its process died")) + "\n")
            answers.flush()


def _answer(case: Case, fault: str) -> str | None:
    """Return the result of a case as JSON, from the process of its traced rank; the processes of
    its peers, which this one forks, return None."""
    from benchmarks.gpu_proof.peers import Peers, forked
    from benchmarks.gpu_proof.step import as_json, trace_case

    peers, children = None, list[int]()
    folder = Path(tempfile.mkdtemp(prefix="gpu-proof-peers-"))
    if case.together:
        rank, children = forked(case.together, case.rank)
        peers = Peers(folder, rank, case.together)
    try:
        text = as_json(case, trace_case(case, fault, peers))
    except BaseException:
        error = "\n".join(traceback.format_exc().splitlines()[-12:])
        if peers is not None:
            peers.fail(error)
        text = json.dumps(error)
    if peers is not None and peers.rank != case.rank:
        return None
    for process in children:
        os.waitpid(process, 0)
    shutil.rmtree(folder)
    return text


def section(case: Case, traced: dict[str, Any]) -> str:
    """Return the lines of the page about one case."""
    memory = f"{traced['step']['peak'] / 2**20:.0f} MiB of tensors at the peak"
    if case.follows_memory:
        memory += f", planner {traced['predicted'] / 2**20:.0f} MiB"
    name = f"{case.name[0].upper()}{case.name[1:]}"
    return f"### {name}\n\n{traced['choice']}. {memory}.\n\n{table(case, traced)}"


def table(case: Case, traced: dict[str, Any]) -> str:
    """Return the table of a case: what a step, its logging and an evaluation of two batches
    exchange, where the host waits, and where streams wait for each other."""
    ranks = "1 rank" if case.world_size == 1 else f"{case.world_size} ranks"
    lines = [f"| {case.name}: per step of one of {ranks} | |", "|---|---|"]
    for name, suffix in (("step", ""), ("logged", " if logged"), ("evaluation", " in evaluation")):
        record = traced[name]
        for operation, group, dtype, count in record["exchanged"]:
            lines.append(f"| {operation}{suffix}, {group} | {count:,} {dtype} |")
        for kind, label in (("waits", "waits"), ("orders", "streams")):
            for place, count in record[kind].items():
                lines.append(f"| {label}{suffix} | {count} x {place} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Trace all cases, or those whose name contains a text. Returns the exit code: 1 if a case
    fails or contradicts the planner, or is not as on the page."""
    parser = argparse.ArgumentParser(prog="gpu_proof", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} anew")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        _serve()
        return 0
    if reason := why_not():
        print(f"gpu_proof: {reason}", file=sys.stderr)
        return 2
    failed, sections, begun = 0, [], time.monotonic()
    page = PAGE.read_text() if PAGE.exists() else ""
    for case, traced in trace_apart([(case, "") for case in CASES if args.only in case.name]):
        problems = [traced] if isinstance(traced, str) else traced["problems"]
        if not isinstance(traced, str):
            sections.append(section(case, traced))
            if not args.write and table(case, traced) not in page:
                problems.append(f"is not as in docs/{PAGE.name}:\n{sections[-1]}")
        failed += bool(problems)
        print(f"{time.monotonic() - begun:.0f} s, {case.name}: {'FAILED' if problems else 'ok'}")
        print("".join(f"  {problem}\n" for problem in problems), end="", flush=True)
    if args.write and not failed:
        head, marker, _ = page.partition(MARKER)
        PAGE.write_text(f"{head}{marker}\n" + "\n".join(sections))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
