"""Outer steps of two sites while strangers open and close connections to their server.

python benchmarks/strangers.py [--rate 300] [--burst 300] [--hold 300] [--seconds 6] [--pairs 5]
One outer server and two sites on this machine, each one process that trains a tiny model; the
server's log is a file. Phases of `--seconds` alternate: undisturbed, and with `--rate` connections
a second from one address, `--burst` at a time, of which the newest `--hold` stay open. It prints
the outer steps a second of each phase, the ratio of their medians, the slowest signed request
during the phases with strangers, and the bytes of the server's log. Exit code 1 if the ratio is
below 0.9 or the log above 100 kB. The strangers compete with the sites for this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.startup import ROOT, write_run
from bigtrain.sites.client import ServerClient
from tests.support.worlds import free_port

LEAST_RATIO, MOST_LOG_BYTES = 0.9, 100_000
TOKEN = "0123456789abcdef0123456789abcdef"
START_SECONDS = 180.0


DISTURB = """
import collections, contextlib, socket, sys, threading, time
port, rate, burst, hold = int(sys.argv[1]), *map(float, sys.argv[2:])
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
held, count, begun = collections.deque(), 0, time.monotonic()
print("begun", flush=True)
while not ended.wait(0.005):
    if (time.monotonic() - begun) * rate < count:
        continue
    for _ in range(int(burst)):
        stranger = socket.socket()
        stranger.setblocking(False)
        with contextlib.suppress(OSError):
            stranger.connect(("127.0.0.1", port))
        held.append(stranger)
        count += 1
    while len(held) > hold:
        held.popleft().close()
print(count, f"{count / (time.monotonic() - begun):.0f}")
"""
"""A process that opens and closes connections until its input ends; it imports nothing large."""


class Sites:
    """A server and two sites that train until `end`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.log = folder / "server.log"
        token = folder / "token"
        token.write_text(TOKEN)
        run_yaml = write_run(folder)
        server = [
            *("-m", "bigtrain.cli", "outer-server", "--directory", folder / "state"),
            *("--token-file", token, "--port", self.port, "--host", "127.0.0.1"),
        ]
        self._processes = [self._start(self.log, server)]
        for index in (0, 1):
            site = [
                *(ROOT / "bigtrain" / "train.py", "--config", run_yaml),
                *(f"sites.index={index}", "sites.count=2", "sites.inner_steps=2"),
                *(f"sites.server=http://127.0.0.1:{self.port}", f"sites.token_file={token}"),
                *(f"output.directory={folder / str(index)}", "output.export=false"),
                *("train.steps=1000000", "checkpoint.every_steps=null"),
                *("evaluation.every_steps=null", "schedule.type=constant"),
            ]
            self._processes.append(self._start(folder / f"{index}.log", site))

    def _start(self, log: Path, command: list[object]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with log.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, *map(str, command)], stdout=file, stderr=file, env=environment
            )

    def outer_steps(self) -> int:
        """Return how many outer steps site 0 has made."""
        metrics = self.folder / "0" / "metrics.jsonl"
        text = metrics.read_text() if metrics.exists() else ""
        return text.count('"outer_step"')

    def server_seconds(self) -> float:
        """Return the processor seconds of the server so far."""
        times = psutil.Process(self._processes[0].pid).cpu_times()
        return float(times.user + times.system)

    def wait_for(self, count: int) -> None:
        """Wait for so many outer steps. Raises RuntimeError if a process ends before."""
        limit = time.monotonic() + START_SECONDS
        while self.outer_steps() < count:
            if any(one.poll() is not None for one in self._processes) or time.monotonic() > limit:
                logs = [path.read_text()[-2000:] for path in self.folder.glob("*.log")]
                raise RuntimeError("the sites do not train:\n" + "\n".join(logs))
            time.sleep(0.1)

    def end(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            process.kill()
            process.wait()


def rate_of(sites: Sites, seconds: float) -> tuple[float, float, float]:
    """Return outer steps a second, the seconds of the slowest signed request meanwhile, and the
    processor seconds of the server a second."""
    client = ServerClient(f"http://127.0.0.1:{sites.port}", TOKEN.encode())
    before, begun, slowest = sites.outer_steps(), time.monotonic(), 0.0
    busy_before = sites.server_seconds()
    while (now := time.monotonic()) < begun + seconds:
        client.ask("hello", {}, deadline=now + seconds)
        slowest = max(slowest, time.monotonic() - now)
        time.sleep(0.25)
    elapsed = time.monotonic() - begun
    busy = (sites.server_seconds() - busy_before) / elapsed
    return (sites.outer_steps() - before) / elapsed, slowest, busy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=300.0, help="connections a second")
    parser.add_argument("--burst", type=int, default=300, help="connections at a time")
    parser.add_argument("--hold", type=int, default=300, help="connections that stay open")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a phase")
    parser.add_argument("--pairs", type=int, default=5, help="of phases")
    args = parser.parse_args()
    quiet, disturbed, slowest, num_strangers = [], [], 0.0, []
    busy: dict[str, list[float]] = {"quiet": [], "disturbed": []}
    with tempfile.TemporaryDirectory() as scratch:
        sites = Sites(Path(scratch))
        try:
            sites.wait_for(20)
            for _ in range(args.pairs):
                rate, _, server_busy = rate_of(sites, args.seconds)
                quiet.append(rate)
                busy["quiet"].append(server_busy)
                words = map(str, (sites.port, args.rate, args.burst, args.hold))
                strangers = subprocess.Popen(
                    [sys.executable, "-S", "-c", DISTURB, *words],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )  # fmt: skip
                assert strangers.stdout is not None
                assert strangers.stdout.readline() == "begun\n"
                rate, longest, server_busy = rate_of(sites, args.seconds)
                busy["disturbed"].append(server_busy)
                num_strangers.append(strangers.communicate("", timeout=60)[0].split()[1])
                disturbed.append(rate)
                slowest = max(slowest, longest)
        finally:
            sites.end()
        log_bytes = sites.log.stat().st_size
    ratio = statistics.median(disturbed) / statistics.median(quiet)
    print(f"outer steps a second, undisturbed: {', '.join(f'{rate:.2f}' for rate in quiet)}")
    print(
        f"with {', '.join(num_strangers)} strangers a second: "
        f"{', '.join(f'{rate:.2f}' for rate in disturbed)}"
    )
    print(f"ratio of medians {ratio:.3f} (at least {LEAST_RATIO})")
    print(f"slowest signed request {slowest:.3f} s, server log {log_bytes:,} bytes")
    without, beside = (statistics.median(busy[name]) for name in ("quiet", "disturbed"))
    print(f"server: {without:.3f} processor seconds a second undisturbed, {beside:.3f} disturbed")
    print(json.dumps({"ratio": ratio, "log_bytes": log_bytes, "slowest_seconds": slowest}))
    return 0 if ratio >= LEAST_RATIO and log_bytes <= MOST_LOG_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
