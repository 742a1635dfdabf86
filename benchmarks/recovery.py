"""Seconds from a failure to the next finished step, by part, over repeated kills of a run.

python benchmarks/recovery.py [--kinds rank host main] [--kills 3] [--hosts 3] [--processes 2]
                              [--rendezvous bigtrain torch]
Hosts in network namespaces on one machine (root, `make test-deps`) train a tiny model by the
script of `bigtrain launch torchrun`; another host serves the rendezvous. A kill is SIGKILL to one
rank (`rank`), or a cut link and SIGKILL to every process of a host that has not rank 0 (`host`) or
that has it (`main`). Before the next kill the host is back and all train. With ``--spares 1`` one
more host idles until one is lost, and the world stays. ``--rendezvous bigtrain torch`` repeats
all with torch's own rendezvous and new processes for restarted ranks. The parts add up:

noticed      until the first remaining agent reports a failed rank
ended        until every remaining agent has ended its ranks
rendezvous   until the last agent starts its ranks, with the wait for hosts that may join
imports      until rank 0 has imported its libraries and checked its inputs
groups, model, weights, first step   of rank 0, from its own log line
lost steps   finished before the kill and computed again

Agents log their times in log lines of torch (LOGLEVEL=INFO), which this reads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.startup import ROOT, write_run
from bigtrain.cli import main as bigtrain
from bigtrain.launchers.torchrun import RANKS
from bigtrain.run.diagnostics.start_times import FIRST_STEP, GROUPS, IMPORTS, MODEL, WEIGHTS
from tests.support.cluster import Cluster, cluster, wait_until, why_not

KINDS = ("rank", "host", "main")
RENDEZVOUS = ("bigtrain", "torch")
PARTS = ("noticed", "ended", "rendezvous", "imports", "groups", "model", "weights", FIRST_STEP)
_OF_RANK = {"groups": GROUPS, "model": MODEL, "weights": WEIGHTS, FIRST_STEP: FIRST_STEP}
_AGENT_LINE = re.compile(r"^[A-Z](\d{4}) (\d\d:\d\d:\d\d\.\d{6}) .*?\] (.*)$", re.MULTILINE)
_NOTICED = "will restart worker group"
_ENDED = "Rendezvous'ing worker group"
_STARTED = "Starting worker group"
_SPARE = "this one is a spare"
_LIMIT_SECONDS = 300.0

Value = TypeVar("Value")


@dataclass(frozen=True)
class Recovery:
    """Seconds of each part after one kill, and the steps computed again."""

    kind: str
    seconds: dict[str, float]
    lost_steps: int

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class TrainedRun:
    """A run under torchrun on hosts of `hosts`; n0 serves the rendezvous and trains nothing."""

    def __init__(
        self, hosts: Cluster, folder: Path, args: argparse.Namespace, rendezvous: str
    ) -> None:
        self._hosts, self._folder = hosts, folder
        self._names = list(hosts.hosts)[1:]
        self._processes = args.processes
        self.directory = folder / "run"
        self._script = folder / "run.sh"
        words = ["launch", "torchrun", "--config", str(write_run(folder)), "--gpus-per-node", "0"]
        self._num_trained = args.hosts
        nodes = str(args.hosts) if args.spares else f"1-{args.hosts}"
        words += ["--nodes", nodes, "--spares", str(args.spares)]
        words += ["--processes-per-node", str(args.processes)]
        ranks = args.ranks if rendezvous == "bigtrain" else "new"
        words += ["--rendezvous", "n0:29400", "--ranks", ranks, "--output", str(self._script)]
        words += ["--last-call-timeout", str(args.last_call_timeout)]
        settings = [
            f"output.directory={self.directory}",
            "output.export=false",
            "train.steps=1000000",
            "batch.global_batch_size=12",
            "batch.micro_batch_size=1",
            f"checkpoint.every_steps={args.save_every}",
            f"watchdog.timeout_seconds={args.watchdog}",
            "watchdog.slow_timeout_seconds=120",
            *args.settings,
        ]
        assert bigtrain([*words, *settings]) == 0
        if rendezvous == "torch":
            script = self._script.read_text()
            assert "--rdzv-backend=bigtrain" in script
            self._script.write_text(
                script.replace("--rdzv-backend=bigtrain", "--rdzv-backend=c10d")
            )
        self._start("n0", "serve")
        for name in self._names:
            self._start(name)
        self._spares = args.spares
        self._wait_for_world(0)

    def _start(self, name: str, *words: str) -> None:
        log = self._folder / f"{name}.log"
        command = f"exec bash {self._script} {' '.join(words)} >> {log} 2>&1"
        environment = {"PYTHONPATH": str(ROOT), "LOGLEVEL": "INFO", "HF_HUB_OFFLINE": "1"}
        self._hosts.start(name, "sh", "-c", command, cwd=self._folder, **environment)

    def recover(self, kind: str) -> Recovery:
        """Kill, wait for the next step, and return its times; all hosts train on return."""
        hosts = self._ranks_by_host()
        main = next(name for name, ranks in hosts.items() if 0 in ranks)
        other = next(name for name in reversed(sorted(hosts)) if name != main)
        name = main if kind == "main" else other
        lines, starts, step = self._lines(), self._num_starts(), self._step()
        killed_at = time.time()
        if kind == "rank":
            self._hosts.ranks(name)[-1].kill()
        else:
            self._hosts.link(name, "down")
            for process in self._hosts.processes(name, "bigtrain.launchers.agent"):
                process.kill()  # and with it its ranks
        ended = self._wait(lambda: self._line_after(lines), "a step after the failure")
        recovery = self._parts(kind, killed_at, ended, [n for n in self._names if n != name], step)
        if kind != "rank":
            self._hosts.link(name, "up")
            self._start(name)
        self._wait_for_world(starts)
        return recovery

    def _parts(
        self, kind: str, killed_at: float, ended: float, remaining: list[str], step: int
    ) -> Recovery:
        agents = self._names if kind == "rank" else remaining
        noticed = min(self._agent_times(agents, _NOTICED, killed_at), default=killed_at)
        stopped = max(self._agent_times(agents, _ENDED, killed_at), default=noticed)
        started = max(self._agent_times(agents, _STARTED, killed_at), default=stopped)
        log = (self.directory / "log.txt").read_text()
        [resumed] = re.findall(r"resumed at step (\d+)", log)[-1:] or ["0"]
        of_rank = rank_seconds(log)
        times = [killed_at, noticed, stopped, started]
        seconds = dict(zip(PARTS, _differences(times), strict=False))
        own = {part: of_rank[key] for part, key in _OF_RANK.items()}
        seconds["imports"] = ended - started - sum(own.values())
        return Recovery(kind, seconds | own, max(0, step - int(resumed)))

    def _agent_times(self, names: list[str], words: str, after: float) -> list[float]:
        """Return the time of the first line with `words` of each agent after `after`."""
        times = []
        for name in names:
            log = (self._folder / f"{name}.log").read_text()
            matching_times = [at for at, text in agent_lines(log) if words in text and at >= after]
            times += matching_times[:1]
        return times

    def _wait_for_world(self, starts: int) -> None:
        """Wait until all hosts but spares, which idle, have trained some steps since the newest
        start."""

        def trains() -> bool:
            if self._num_starts() <= starts or len(self._ranks_by_host()) != self._num_trained:
                return False
            if self._num_idle() != self._spares:
                return False
            newest = json.loads((self.directory / "starts.jsonl").read_text().splitlines()[-1])
            return bool(self._step() >= int(newest["step"]) + 5)

        self._wait(lambda: trains() or None, f"{self._num_trained} hosts train")

    def _num_idle(self) -> int:
        """Return how many agents idle as spares, by their logs."""
        logs = [(self._folder / f"{name}.log").read_text() for name in self._names]
        return sum(log.rfind(_SPARE) > log.rfind(_STARTED) for log in logs)

    def _wait(self, value: Callable[[], Value | None], what: str) -> Value:
        values: list[Value] = []

        def is_there() -> bool:
            there = value()
            if there is not None:
                values.append(there)
            return bool(values)

        try:
            wait_until(what, is_there, _LIMIT_SECONDS)
        except AssertionError as error:
            logs = [path.read_text()[-2500:] for path in sorted(self._folder.glob("n*.log"))]
            raise AssertionError("\n".join([str(error), *logs])) from None
        return values[0]

    def _ranks_by_host(self) -> dict[str, list[int]]:
        path = self.directory / "environment.json"
        hosts: dict[str, list[int]] = json.loads(path.read_text())["hosts"] if path.exists() else {}
        return hosts

    def _lines(self) -> int:
        """Return how many launches of the run have finished a step."""
        return len(_START_LINE.findall(self._log()))

    def _line_after(self, count: int) -> float | None:
        """Return when the first step of a launch after the first `count` ended."""
        start_times = _START_LINE.findall(self._log())
        return float(start_times[count][0]) if len(start_times) > count else None

    def _log(self) -> str:
        path = self.directory / "log.txt"
        return path.read_text() if path.exists() else ""

    def _num_starts(self) -> int:
        path = self.directory / "starts.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def _step(self) -> int:
        path = self.directory / "metrics.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        return next((int(json.loads(x)["step"]) for x in reversed(lines) if x.endswith(b"}")), 0)


_START_LINE = re.compile(r"the first step ended at ([\d.]+), [\d.]+ s after [^:]*: (.*)")


def agent_lines(log: str) -> list[tuple[float, str]]:
    """Return the time (seconds since the epoch) and text of each line of torch's logger."""
    year = datetime.now().year
    return [
        (datetime.strptime(f"{year}{day} {clock}", "%Y%m%d %H:%M:%S.%f").timestamp(), text)
        for day, clock, text in _AGENT_LINE.findall(log)
    ]


def rank_seconds(log: str) -> dict[str, float]:
    """Return the seconds of each part of the newest launch, from the line of `StartTimes`."""
    _, parts = _START_LINE.findall(log)[-1]
    split = [part.rpartition(" ") for part in parts.split(", ")]
    seconds = {name: float(value) for name, _, value in split}
    assert IMPORTS in seconds
    return seconds


def _differences(times: list[float]) -> list[float]:
    return [max(0.0, b - a) for a, b in itertools.pairwise(times)]


def main() -> None:
    """Kill repeatedly, print the seconds of each recovery, their medians, and both as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--kills", type=int, default=3, help="of each kind")
    parser.add_argument("--hosts", type=int, default=3, help="that train")
    parser.add_argument("--spares", type=int, default=0, help="hosts that wait for a lost one")
    parser.add_argument("--processes", type=int, default=2, help="ranks of each host")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--watchdog", type=int, default=10, help="watchdog.timeout_seconds")
    parser.add_argument("--last-call-timeout", type=int, default=6, help="of the rendezvous")
    parser.add_argument("--ranks", default="auto", choices=RANKS, help="how ranks are started")
    parser.add_argument("--rendezvous", nargs="+", choices=RENDEZVOUS, default=["bigtrain"])
    parser.add_argument("settings", nargs="*", help="settings of the run to change, KEY=VALUE")
    args = parser.parse_intermixed_args()
    if reason := why_not(slurm=False, ssh=False):
        sys.exit(f"hosts in namespaces cannot run here: {reason}")
    results = []
    for rendezvous in args.rendezvous:
        print(f"rendezvous of {rendezvous}", flush=True)
        print("kind   " + "".join(f"{part:>11}" for part in (*PARTS, "total", "lost steps")))
        recoveries = measure(args, rendezvous)
        results += [{"rendezvous": rendezvous, **asdict(one)} for one in recoveries]
        _print_medians(recoveries, args.kinds)
    print(json.dumps(results))


def measure(args: argparse.Namespace, rendezvous: str) -> list[Recovery]:
    """Kill repeatedly in one run; print each recovery and return all."""
    recoveries: list[Recovery] = []
    with tempfile.TemporaryDirectory(prefix="recovery_") as name:
        folder = Path(name) / "work"  # in no command line of a host's own processes
        folder.mkdir()
        num_hosts = 1 + args.hosts + args.spares
        with cluster(Path(name) / "state", num_hosts, slurm=False, ssh=False) as hosts:
            run = TrainedRun(hosts, folder, args, rendezvous)
            for _ in range(args.kills):
                for kind in args.kinds:
                    recoveries.append(run.recover(kind))
                    _print(kind, recoveries[-1].seconds, recoveries[-1].lost_steps)
    return recoveries


def _print_medians(recoveries: list[Recovery], kinds: list[str]) -> None:
    for kind in kinds:
        of_kind = [one for one in recoveries if one.kind == kind]
        seconds = {p: statistics.median(one.seconds[p] for one in of_kind) for p in PARTS}
        total = statistics.median(one.total for one in of_kind)
        lost = statistics.median(one.lost_steps for one in of_kind)
        _print(f"median of {len(of_kind)}: {kind}\n      ", seconds, lost, total)


def _print(
    kind: str, seconds: dict[str, float], lost_steps: float, total: float | None = None
) -> None:
    values = [*(seconds[part] for part in PARTS), sum(seconds.values()) if total is None else total]
    print(f"{kind:<7}" + "".join(f"{value:11.2f}" for value in values) + f"{lost_steps:11.0f}")


if __name__ == "__main__":
    main()
