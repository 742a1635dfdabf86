"""Pool of worker processes of one tokenizing command.

There is no queue: every worker iterates over all units, the units of its share first, and builds
the units that are neither done nor leased by another worker; `bigtrain.data.tokenize_job.job`
checks again at the end. `bigtrain.data.tokenize_job.unit_builder` builds one unit.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import NamedTuple

from bigtrain.data.tokenize_job.existing_output import confirm_unit
from bigtrain.data.tokenize_job.request import WorkerRank, Workers
from bigtrain.data.tokenize_job.unit_builder import Counts, Job, build_unit
from bigtrain.data.tokenize_job.workspace import Unit, Workspace
from bigtrain.data.tokenizers.encoders import EncoderError
from bigtrain.errors import BigtrainError, DataError

REPORT_BYTES = 1 << 22
"""Bytes after which a worker reports progress: a few times a second."""
Update = Callable[[int, Counts], None]
"""Callback with a worker's number and its counts in this round."""


class _Worker(NamedTuple):
    number: int
    process: SpawnProcess


@dataclass(frozen=True)
class Round:
    """Unfinished units, and everything needed to build them."""

    units: tuple[Unit, ...]
    share: WorkerRank
    job: Job
    workspace: Workspace


def new_token() -> str:
    """Return a name that is unique among processes on all machines."""
    return uuid.uuid4().hex[:12]


def run_round(work: Round, workers: Workers, update: Update) -> None:
    """Build the units of `work` on which no other process holds a lease. With several workers, the
    first error of a worker is raised, and all workers are killed."""
    num_processes, num_threads = workers.num_processes, workers.num_threads
    if not workers.started:
        # Even on one core reading and writing wait less in parallel with an encoder.
        job = replace(work.job, num_threads=max(2, num_threads))
        _build_units(replace(work, job=job), partial(update, 0))
        return
    job = replace(work.job, num_threads=num_threads)
    # Start the workers. Not by fork: the threads of a tokenizer that was used do not survive it.
    context = multiprocessing.get_context("spawn")
    started: dict[Connection, _Worker] = {}  # by the connection on which a worker reports
    worker_tokens: set[str] = set()
    try:
        for number in range(num_processes):
            receiver, sender = context.Pipe(duplex=False)
            workspace = replace(work.workspace, token=new_token())
            share = work.share.split(number, num_processes)
            worker_round = replace(work, share=share, job=job, workspace=workspace)
            process = context.Process(target=_run_worker, args=(worker_round, num_threads, sender))
            process.start()
            sender.close()
            worker_tokens.add(workspace.token)
            started[receiver] = _Worker(number, process)
        _follow(started, update)
    finally:
        # After an error: end all workers, and free their units for the next round.
        for worker in started.values():
            worker.process.kill()
        for worker in started.values():
            worker.process.join()
        if work.workspace.directory.exists():
            work.workspace.leases.release(worker_tokens)


def _follow(started: dict[Connection, _Worker], update: Update) -> None:
    """Wait until every worker has reported its end. Raise the first reported error."""
    running = dict(started)
    while running:
        for connection in wait(list(running)):
            assert isinstance(connection, Connection)
            number, process = running[connection]
            try:
                message = connection.recv()  # `Counts`, and at the end None or an error
            except EOFError:
                process.join()
                raise DataError(
                    f"a tokenizing process died (exit code {process.exitcode}), most likely out of "
                    "memory -> fewer --workers"
                ) from None
            if isinstance(message, Counts):
                update(number, message)
                continue
            del running[connection]
            if isinstance(message, BaseException):
                raise message


def _build_units(work: Round, report: Callable[[Counts], None]) -> None:
    """Build the units that are neither done nor leased. Raise the error of the first that fails."""
    workspace, counts = work.workspace, Counts()
    leases = workspace.leases
    reported_bytes = 0

    def report_progress() -> None:
        nonlocal reported_bytes
        if counts.num_bytes - reported_bytes >= REPORT_BYTES:
            reported_bytes = counts.num_bytes
            report(counts)

    for unit in work.share.order(work.units):
        # Another worker may have built the unit since the start of the round.
        if workspace.is_done(unit):
            continue
        with leases.take(unit.key) as has_lease:
            # The last owner may have finished the unit just before releasing the lease.
            if has_lease and not workspace.is_done(unit):
                if work.job.encoder.engine() in workspace.rejected():
                    return  # by another process; the next round uses another encoder
                # A unit whose inputs have new times only is compared instead of built.
                if confirm_unit(unit, workspace, work.job.reading):
                    counts.num_bytes += unit.num_bytes
                    report(counts)
                    continue
                build_unit(unit, work.job, workspace, counts, report_progress)
                report(counts)


def _run_worker(work: Round, num_threads: int, connection: Connection) -> None:
    """Run a worker process: send counts, then None or the error."""
    os.environ["RAYON_NUM_THREADS"] = str(num_threads)  # before a library starts its threads
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_threads > 1 else "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it, and ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _build_units(work, connection.send)
    except (BigtrainError, EncoderError, OSError) as error:
        connection.send(error)
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None
    else:
        connection.send(None)


def _end_with_parent() -> None:
    """End this worker if its parent dies: it would continue, and keep its standard output open."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
