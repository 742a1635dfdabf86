"""`make quickstart`: the main job on real text, each step a command that can be typed by hand.

The text is the source of the Python standard library, which every machine with Python has. In
``runs/quickstart`` (or the folder given): a tokenizer is trained, the text tokenized, a small Llama
trained under DeepSpeed on every device (two CPU processes where there is none), killed on the way,
started again, exported, and asked for a continuation. Started again, it continues from there.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from bigtrain.system.next_commands import next_lines, run_lines

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PROMPT = "def read(self, "
GLOBAL_BATCH_SIZE = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("overrides", nargs="*", help="SECTION.KEY=VALUE of the run")
    args = parser.parse_args()
    begun = time.monotonic()
    home: Path = args.directory
    tokenizer, shards, run = home / "tokenizer", home / "shards", home / "run"
    text = ["--input", sysconfig.get_path("stdlib"), "--suffix", ".py"]
    # Debian links its own settings of the library from there.
    text += ["--exclude", "site-packages", "--exclude", "sitecustomize.py", "--skip-bad"]
    if not tokenizer.is_dir():
        bigtrain("tokenizer", *text, "--vocab-size", "4096", "--output", str(tokenizer))
    bigtrain(
        *("tokenize", *text, "--tokenizer", str(tokenizer), "--held-out", "0.02"),
        *("--output", str(shards)),
    )
    train = train_command(shards, run, args.overrides)
    if not list(run.glob("checkpoints/step-*/manifest.json")):
        say("train, and kill every process after the first checkpoint:")
        kill_at_first_checkpoint(train)
    say("the same command continues from the newest checkpoint:")
    call(train)
    bigtrain("generate", "--model", str(run / "hf"), "--prompt", PROMPT)
    report(shards, run, time.monotonic() - begun)
    return 0


def train_command(shards: Path, run: Path, overrides: list[str]) -> list[str]:
    """Return `deepspeed` over all devices of this machine, as many as divide the batch."""
    num_devices, dtype = devices()
    num_processes = max(n for n in range(1, num_devices + 1) if GLOBAL_BATCH_SIZE % n == 0)
    return [
        *(str(BIN / "deepspeed"), "--quiet", "--num_accelerators", str(num_processes)),
        *("--master_port", str(free_port())),
        *(str(ROOT / "bigtrain/train.py"), "--config", "quickstart"),
        *(f"data.path={shards}", f"output.directory={run}", f"precision.dtype={dtype}"),
        f"batch.micro_batch_size={GLOBAL_BATCH_SIZE // num_processes}",
        *overrides,
    ]


def devices() -> tuple[int, str]:
    """Processes to start, and the number format: bfloat16 where a GPU has it."""
    code = "import torch; c = torch.cuda; print(c.device_count(), c.is_bf16_supported())"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    num_gpus = int(output[0])
    return (
        (num_gpus, "bfloat16" if output[1] == "True" else "float32")
        if num_gpus
        else (
            2,
            "float32",
        )
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def bigtrain(*arguments: str) -> None:
    call([str(BIN / "bigtrain"), *arguments])


def call(command: list[str]) -> None:
    show(command)
    subprocess.run(command, check=True, env=environment())


def kill_at_first_checkpoint(command: list[str]) -> None:
    """Kill the launcher and all its processes once the first checkpoint exists."""
    show(command)
    process = subprocess.Popen(
        command,
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    assert process.stdout is not None
    finished = True
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith("checkpoint of step"):
            finished = False
            # The launcher and its processes share the new session's process group.
            os.killpg(process.pid, signal.SIGKILL)
            break
    code = process.wait()
    if finished and code:
        raise subprocess.CalledProcessError(code, command)


def environment() -> dict[str, str]:
    # DeepSpeed builds its shared-memory collectives with ninja, once, and looks for it on PATH.
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


def report(shards: Path, run: Path, seconds: float) -> None:
    """Print the held-out loss next to that of a unigram model of the same tokens."""
    script = Path(__file__).with_name("unigram_entropy.py")
    unigram = float(
        subprocess.run(
            [sys.executable, str(script), str(shards)], capture_output=True, text=True, check=True
        ).stdout
    )
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["held_out_loss"] for record in records if "held_out_loss" in record]
    say(f"held-out loss {losses[-1]:.3f} nats per token; a unigram model's {unigram:.3f}")
    say(f"{seconds:.0f} s; Hugging Face model in {run / 'hf'}, metrics in {run}/metrics.jsonl")
    if losses[-1] > unigram - 1:
        raise SystemExit("quickstart: the model did not learn more than token frequencies")
    say(
        next_lines(
            f"source {shlex.quote(str(BIN / 'activate'))}",
            *run_lines(run, run / "hf"),
            "bigtrain start --model MODEL --data FILE   # a model and data of your own",
        )
    )


def show(command: list[str]) -> None:
    say("$ " + shlex.join(command))


def say(text: str) -> None:
    print(f"\n{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
