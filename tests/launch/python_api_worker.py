"""What `import bigtrain` offers, in a process of its own: `python_api_worker.py CASE ARGUMENTS`."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import bigtrain
from tests.support.streams import Shuffled

for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    if sys.argv[1] != "world":
        os.environ.pop(name, None)


def state() -> dict[str, Any]:
    """What a run changes in its process while it trains."""
    return {
        "environment": dict(os.environ),
        "group": torch.distributed.is_initialized(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "threads": torch.get_num_threads(),
        "random": torch.random.get_rng_state().tolist(),
        "linear": torch.nn.functional.linear,
        "precision": torch.get_float32_matmul_precision(),
    }


def page(path: str, folder: str) -> None:
    """The code of a page of the docs, from its top."""
    os.chdir(folder)
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", Path(path).read_text(), flags=re.M | re.S):
        exec(compile(block, path, "exec"), names)
    result = names["result"]
    assert result.is_complete
    assert (result.step, result.stopped_by, result.exit_code) == (20, None, 0)
    assert [line["step"] for line in bigtrain.read_metrics(result.directory)] == [5, 10, 15, 20]
    assert result.loss == names["columns"]["loss"][-1]
    assert result.held_out_loss == names["evaluations"][-1]["held_out_loss"]
    assert names["weights"].keys() >= {"model.embed_tokens.weight", "model.norm.weight"}
    print("page done")


def trains(run_yaml: str, directory: str) -> None:
    """Twice in one process, with ZeRO 0 and 3; the second time each is complete already."""
    before = state()
    for engine in ("zero0", "zero3"):
        overrides = (f"output.directory={directory}/{engine}", "train.steps=4")
        for _ in range(2):
            result = bigtrain.train_run(run_yaml, *overrides, deepspeed_config=engine)
            assert result.is_complete
            after = state()
            assert after == before, [key for key in before if before[key] != after[key]]
        assert result.export == Path(directory, engine, "hf")
    tree = yaml.safe_load(Path(run_yaml).read_text())
    tree["output"]["directory"] = f"{directory}/stopped"
    stopped(tree)
    wrong(run_yaml)
    print("trained")


def stopped(tree: dict[str, Any]) -> None:
    """SIGINT in the middle stops it, and the next call goes on."""
    tree["train"]["steps"] = 400
    tree["checkpoint"] = {"every_steps": None}
    tree["evaluation"] = {"every_steps": None, "samples": 8}
    log = Path(tree["output"]["directory"], "metrics.jsonl")

    def interrupt() -> None:
        while not (log.exists() and len(log.read_text().splitlines()) >= 3):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    result = bigtrain.train_run(tree)
    thread.join()
    assert result.stopped_by == "SIGINT"
    assert 3 <= result.step < 400
    assert result.exit_code == 75
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    weights = bigtrain.load_state_dict(result.directory)
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())


def wrong(run_yaml: str) -> None:
    """Errors are raised, not printed, and leave the process as it was."""
    for error, arguments in (
        (bigtrain.ConfigError, ("no.such=1",)),
        (bigtrain.ConfigError, ("data.path=nowhere", "output.directory=never")),
    ):
        try:
            bigtrain.train_run(run_yaml, *arguments)
        except error:
            continue
        raise AssertionError(error)
    assert not torch.distributed.is_initialized()
    assert not Path("never").exists()


def world(run_yaml: str, directory: str) -> None:
    """One of the ranks of a launcher: every rank gets the same result."""
    result = bigtrain.train_run(run_yaml, f"output.directory={directory}/world", "train.steps=4")
    seen = {"step": result.step, "loss": result.loss, "held_out": result.held_out_loss}
    Path(directory, f"result-{os.environ['RANK']}.json").write_text(json.dumps(seen))


CELL = """
import bigtrain

def focal(batch):
    chances = batch.log_probabilities.exp()
    bigtrain.record("chance", chances[batch.targets].mean())
    return -((1 - chances) ** 2 * batch.log_probabilities).sum()

class Focal:
    unit = "tokens"
    def __init__(self, gamma=2.0):
        self.gamma = gamma
    def loss(self, batch):
        chances = batch.log_probabilities.exp()
        return -((1 - chances) ** self.gamma * batch.log_probabilities).sum()

def wrong(batch, more):
    return more
"""


def losses(run_yaml: str, directory: str) -> None:
    """A loss of a cell: a function, an object, a class and a closure train alike."""
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, "<ipython-input-3>", "exec"), cell)
    focal, Focal = cell["focal"], cell["Focal"]

    def made(gamma: int) -> Any:
        return lambda batch: (
            -((1 - batch.log_probabilities.exp()) ** gamma * batch.log_probabilities).sum()
        )

    trained = []
    for number, loss in enumerate((focal, Focal(), Focal, made(2), made(0), None)):
        arguments = (f"output.directory={directory}/loss-{number}", "train.steps=4")
        result = bigtrain.train_run(run_yaml, *arguments, loss=loss)
        trained.append(result.loss)
    changes = "checkpoint.allow_changes=[train.steps]"
    first = f"output.directory={directory}/loss-0"
    resumed = bigtrain.train_run(run_yaml, first, "train.steps=6", changes, loss=focal)
    assert resumed.step == 6
    assert trained[0] == trained[1] == trained[2] == trained[3] < trained[4]
    assert trained[4] == pytest.approx(trained[5], rel=1e-5)
    rows = bigtrain.read_metrics(f"{directory}/loss-0")
    assert all(0 < row["recorded"]["chance"] < 1 for row in rows)
    for bad, text in ((cell["wrong"], "loss is called as loss(batch)"), (3, "is no function of")):
        with pytest.raises(bigtrain.ConfigError, match=re.escape(text)):
            bigtrain.train_run(run_yaml, loss=bad)
    with pytest.raises(bigtrain.ConfigError, match=r"objective\.type = 'gone:Loss'"):
        bigtrain.train_run(run_yaml, "objective.type=gone:Loss")
    # Several processes: only what each can import.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for loss in (focal, Focal(), made(2)):
        with pytest.raises(bigtrain.ConfigError, match="and 2 processes train -> put it"):
            bigtrain.train_run(run_yaml, loss=loss)
    print("losses done")


def streams(run_yaml: str, directory: str) -> None:
    """A stream has its state again after a run, so that the same object trains it further, as one
    that was never interrupted; a stream with other items does not."""
    stream = Shuffled(length=16)
    next(iter(stream))  # a run begins with the next item
    before = stream.state_dict()
    losses = {}
    for name, parts in (("whole", (6,)), ("parts", (2, 4, 6))):
        for steps in parts:
            overrides = (
                f"output.directory={directory}/{name}",
                "batch.sequence_length=16",
                f"train.steps={steps}",
                "checkpoint.allow_changes=[train.steps]",
                "schedule={type: constant}",
                "logging.every_steps=1",
            )
            bigtrain.train_run(run_yaml, *overrides, data=stream)
            assert stream.state_dict() == before
        rows = bigtrain.read_metrics(f"{directory}/{name}")
        losses[name] = [row["loss"] for row in rows if "loss" in row]
    assert len(losses["whole"]) == 6
    assert losses["whole"] == losses["parts"]
    said = "does not have the training tokens that this run has read.* -> restore the code"
    with pytest.raises(bigtrain.CheckpointError, match=said):
        bigtrain.train_run(run_yaml, *overrides, "train.steps=8", data=Shuffled(length=16))
    print("streams done")


if __name__ == "__main__":
    cases = (page, trains, losses, world, streams)
    {case.__name__: case for case in cases}[sys.argv[1]](*sys.argv[2:])
