"""Parts on diagnostics of a run: out of memory, the flight recorder, the profiler."""

from __future__ import annotations

import json
import pickle

import torch
import torch.distributed as dist

from benchmarks.gpu_check.lives import train, write_run
from benchmarks.gpu_check.results import Part, Setup
from benchmarks.gpu_check.training import Case, alone, run_of, size_of
from bigtrain.models.torch_patches import flight_recorder_trace


def out_of_memory(setup: Setup, part: Part) -> None:
    """Check that a run that does not fit ends with one error, which lists the owners of the
    memory."""
    size = size_of(setup)
    samples = 8 * size.samples
    arguments = write_run(
        setup,
        "large",
        **{
            "batch.global_batch_size": samples,
            "batch.micro_batch_size": samples,
            "model.loss": "plain",
            "train.steps": 2,
        },
    )
    # Model and optimizer fit, the logits do not.
    ended = train(setup, "large", arguments, limit_seconds=setup.seconds, memory_bytes=3 << 30)
    part.check(ended.code == 2, f"the run ended with {ended.code}, not 2: {ended.output[-300:]}")
    text = next((line for line in ended.output.splitlines() if "ran out of" in line), "")
    part.figures["error"] = text
    for wanted in ("ran out of device memory", "activations and other", "micro_batch_size="):
        part.check(wanted in text, f"the error does not contain {wanted!r}")
    snapshots = list((setup.directory / "large").rglob("out_of_memory_rank_0.pickle"))
    part.check(len(snapshots) == 1, "the snapshot of the allocator is missing")


def flight_recorder(setup: Setup, part: Part) -> None:
    """Check torch's record of the last collectives, as the watchdog writes it down when a run
    hangs."""
    with alone(setup, run_of(setup, Case("recorder"))) as device:
        dist.all_reduce(torch.ones(4, device=device))
        if setup.on_gpu:
            torch.cuda.synchronize()
        trace = flight_recorder_trace()
    if trace is None:
        part.fail("this torch has no flight recorder")
        return
    file = setup.directory / "flight-recorder-00000"
    file.write_bytes(trace)
    check_trace(part, file.read_bytes())


def check_trace(part: Part, trace: bytes) -> None:
    """Check that `trace` contains the reduction of `flight_recorder` and its call stack."""
    record = pickle.loads(trace)  # torch's own format, and this process's own bytes
    entries = record.get("entries", [])
    names = sorted({entry["profiling_name"] for entry in entries})
    part.figures |= {"collectives": len(entries), "names": names}
    part.check(any("all_reduce" in name for name in names), f"no all_reduce among {names}")
    frames = [frame["name"] for entry in entries for frame in entry.get("frames", [])]
    part.check("flight_recorder" in frames, "the record has no call stacks")


def profiler(setup: Setup, part: Part) -> None:
    """Check a trace of two steps of a run, with the device's kernels, and a table of the most
    expensive operations."""
    arguments = write_run(setup, "profiled", **{"profile.steps": [2, 3], "train.steps": 4})
    ended = train(setup, "profiled", arguments, limit_seconds=setup.seconds)
    part.check(ended.code == 0, f"the run ended with {ended.code}: {ended.output[-300:]}")
    file = setup.directory / "profiled" / "profile" / "rank_0_steps_2-3.json"
    if not file.exists():
        part.fail("the trace is missing")
        return
    events = json.loads(file.read_text())["traceEvents"]
    kind = "kernel" if setup.on_gpu else "cpu_op"
    kernels = [event["name"] for event in events if event.get("cat") == kind]
    part.figures |= {"events": len(events), f"{kind}_events": len(kernels)}
    part.check(len(kernels) > 10, f"the trace has {len(kernels)} events of kind {kind}")
    log = (setup.directory / "profiled" / "log.txt").read_text()
    part.check("share   calls  operation" in log, "the log has no table of top operations")
