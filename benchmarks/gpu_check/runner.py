"""Check a GPU machine: every part within its limit, results after each, a table at the end.

    make gpu-check                                     # what a user types
    python -m benchmarks.gpu_check --minutes 9.5 --output checked/
    python -m benchmarks.gpu_check --only parity-fp16 offload
    python -m benchmarks.gpu_check --device cpu --tiny  # the same lines, on a CPU

Exit code 0 where every part passed or was skipped with its reason, 1 where one failed, 2 for wrong
arguments. ``results.json`` and ``table.md`` are written after each part, and on a GPU the tables of
speed into docs/benchmarks.md, with a copy of the page as ``benchmarks.md``, so that a check which
is ended keeps what it had; ``logs.txt`` has what failed parts printed, and ``profile.json.gz`` the
trace of bigtrain's default (https://ui.perfetto.dev).

On a machine without a network, with its own torch, from a copied checkout that has wheels in
``.gpu-wheels/`` (`make gpu-wheels`), the same command installs these into a folder of their own
first. What a session types that is lent such a machine by the tool ``device``, with carry
[".gpu-wheels"] and timeout_s 600:

    python3 tools/gpu_check.py --minutes 9.3 --output $OUT
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

# Asking NVML, not CUDA, whether there is a GPU leaves CUDA untouched, so that this process can be
# forked. Before DeepSpeed is imported, which asks.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

from benchmarks.gpu_check.page import PAGE, ROOT, commit_of, write_page
from benchmarks.gpu_check.parts import PARTS, Entry, named
from benchmarks.gpu_check.processes import call, execute, prepare_forks, read_setup, run_part
from benchmarks.gpu_check.results import Part, Setup, Start, table, write_results
from benchmarks.gpu_check.speed import TRACE
from bigtrain.system.files import write_whole

_LOG_CHARACTERS = 16000
_STARTED = time.time()


def run_all(
    entries: Sequence[Entry],
    setup: Setup,
    output: Path,
    *,
    seconds: float,
    start: Start,
    page: Path | None = None,
) -> list[Part]:
    """Run `entries` one after the other within `seconds`; results go to `output` after each.

    setup: device and size, and a folder for what parts write. page: in which tables of speed are
    written. What no time is left for is skipped by name.
    """
    end = time.monotonic() + seconds
    machine: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "commit": commit_of(ROOT),
    }
    parts: list[Part] = []
    for entry in entries:
        left = end - time.monotonic()
        if left < entry.least_seconds:
            part = Part(entry.name)
            part.skip(f"{max(0.0, left):.0f} s were left of {seconds:.0f}")
        else:
            limit = min(entry.limit_seconds, left)
            part, start = _run(entry, setup, limit, start)
        parts.append(part)
        if entry.name == "machine":
            machine |= part.figures
        print(f"{part.part:<20} {part.status:<8} {part.seconds:6.1f} s  {part.reason}", flush=True)
        write_results(output / "results.json", machine, parts)
        write_whole(output / "table.md", (table(parts) + "\n").encode())
        if page is not None:
            write_page(page, machine, parts)
            write_whole(output / page.name, page.read_bytes())
        _keep(entry, part, setup, output)
    return parts


def _run(entry: Entry, setup: Setup, limit: float, start: Start) -> tuple[Part, Start]:
    """Return the part's result, and how the next ones are to be started.

    Where the first forked part cannot use CUDA, it is run once more in a fresh process, and the
    others are started so at once.
    """
    own = replace(setup, directory=setup.directory / entry.name, seconds=limit, start=start)
    part = run_part(entry.name, entry.function, own, start)
    if start == "fork" and setup.on_gpu and _cannot_fork(own.directory):
        print(f"{entry.name}: CUDA cannot be used after a fork here: fresh processes", flush=True)
        again = replace(own, directory=setup.directory / f"{entry.name}-fresh", start="fresh")
        return run_part(entry.name, entry.function, again, "fresh"), "fresh"
    return part, start


def _cannot_fork(directory: Path) -> bool:
    said = "".join(log.read_text(errors="replace") for log in directory.glob("**/*.txt"))
    signs = ("Cannot re-initialize CUDA in forked subprocess", "initialization error")
    return any(sign in said for sign in signs)


def _keep(entry: Entry, part: Part, setup: Setup, output: Path) -> None:
    """Keep the log of a part that failed, and a trace."""
    directory = setup.directory / entry.name
    if part.status == "failed":
        with (output / "logs.txt").open("a") as file:
            for log in sorted(directory.glob("**/*.txt")):
                text = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
                file.write(f"== {entry.name}: {log.relative_to(directory)}\n{text}\n")
    trace = directory / TRACE
    if trace.exists():
        write_whole(output / TRACE, trace.read_bytes())


def build_parser() -> argparse.ArgumentParser:
    """Return the arguments."""
    names = [entry.name for entry in PARTS]
    parser = argparse.ArgumentParser(prog="gpu-check", description="Check a GPU machine.")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--minutes", type=float, default=9.5, help="for all parts together")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of the tests")
    parser.add_argument(
        "--start",
        choices=("fork", "fresh"),
        default="fork",
        help="fork: parts share one import of the libraries; fresh: each imports them",
    )
    # Since 1970, from when on the minutes count: `tools/gpu_check.py` has installed wheels before.
    parser.add_argument("--begun", type=float, default=_STARTED, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu-check"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected parts; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--part"]:
        setup, name = read_setup(words[1]), words[2]
        execute(name, named(name).function, setup)
        return 0
    if words[:1] == ["--call"]:
        return call(words[1], json.loads(words[2]))
    parser = build_parser()
    args = parser.parse_args(words)
    device: Literal["cuda", "cpu"] = args.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --tiny runs the same lines on a CPU")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "logs.txt").unlink(missing_ok=True)
    entries = [entry for entry in PARTS if args.only is None or entry.name in args.only]
    # In two seconds the last results are printed.
    seconds = 60 * args.minutes - (time.time() - args.begun) - 2.0
    if args.start == "fork":
        prepare_forks()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        setup = Setup(device, args.tiny, Path(directory), seconds, args.start)
        # Of a tiny model, or a CPU, the page has no use.
        page = PAGE if setup.on_gpu and not args.tiny else None
        parts = run_all(entries, setup, args.output, seconds=seconds, start=args.start, page=page)
    print(f"\n{table(parts)}")
    print(json.dumps({"results": str(args.output / "results.json")}))
    return 1 if any(part.status == "failed" for part in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
