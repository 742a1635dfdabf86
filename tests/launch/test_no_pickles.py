"""Nothing that a user can be handed is unpickled: a pickle runs code as it is read."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

from bigtrain.cli import main as bigtrain
from bigtrain.train import main as train
from tests.launch.conftest import Inputs
from tests.support.lives import run_script

# The interpreter calls the hook for every name that a pickle asks for, whoever reads it. Those that
# processes of one run send each other are in memory.
PROGRAM = """
import json, pickle, sys

def hook(event, arguments):
    if event != "pickle.find_class":
        return
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/distributed/distributed_c10d.py"):
            return
        frame = frame.f_back
    raise RuntimeError(f"a pickle asks for {arguments}")

sys.addaudithook(hook)
try:
    pickle.loads(pickle.dumps(print))
except RuntimeError:
    pass
else:
    sys.exit("the hook does not work")
from bigtrain import cli, train
sys.exit((cli if sys.argv[1] == "bigtrain" else train).main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_no_pickle_is_loaded_from_any_path(
    finished_run: Path, inputs: Inputs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    newest = max((run / "checkpoints").iterdir())
    shutil.rmtree(newest)  # so that there is something to go on with
    exported = tmp_path / "exported"
    config = ["train.py", "--config", str(inputs.run_yaml)]
    short = ["train.steps=1", "schedule.warmup_steps=0", "output.export=false"]
    commands = [
        [*config, f"output.directory={run}"],
        ["bigtrain", "checkpoints", "--run", str(run)],
        ["bigtrain", "verify", "--run", str(run)],
        ["bigtrain", "export", "--run", str(run), "--output", str(exported)],
        ["bigtrain", "generate", "--model", str(exported), "--prompt", "the"],
    ]
    oldest = run / "checkpoints" / "step-00000008"
    for number, source in enumerate([run, oldest, exported]):
        place = f"output.directory={tmp_path / f'from-{number}'}"
        commands.append([*config, place, f"checkpoint.initialize_from={source}", *short])
    place = f"output.directory={tmp_path / 'from-path'}"
    commands.append([*config, place, "model.config=null", f"model.path={exported}", *short])
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    said = ""
    for command in commands:
        said += run_script(1, program, *command)
    assert "a pickle asks for" not in said
    assert "resumed at step 8 " in said


class Malicious:
    """Makes a directory when it is unpickled."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.directory),)


def test_a_malicious_index_is_not_read(
    finished_run: Path,
    inputs: Inputs,
    alone: None,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As format 1 had it, in checkpoints that are right but for that."""
    run, harm = tmp_path / "run", tmp_path / "harm"
    shutil.copytree(finished_run, run)
    for directory in (run / "checkpoints").iterdir():
        (directory / "tensors" / ".metadata").write_bytes(pickle.dumps(Malicious(harm)))
        manifest = directory / "manifest.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 1}))
    words = ["--config", str(inputs.run_yaml)]
    for arguments in (
        [f"output.directory={run}"],
        [f"output.directory={tmp_path / 'new'}", f"checkpoint.initialize_from={run}"],
    ):
        assert train([*words, *arguments]) == 2
        output = "".join(capfd.readouterr())
        assert "Traceback" not in output
        assert "format 1, whose pickle index is no longer supported" in output
    assert not harm.exists()


def test_malicious_weights_are_not_read(
    finished_run: Path, inputs: Inputs, alone: None, tmp_path: Path
) -> None:
    model, harm = tmp_path / "model", tmp_path / "harm"
    shutil.copytree(finished_run / "hf", model)
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious(harm)))
    words = [f"output.directory={tmp_path / 'run'}", "model.config=null", f"model.path={model}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert train(["--config", str(inputs.run_yaml), *words]) == 2
        assert bigtrain(["generate", "--model", str(model), "--prompt", "the"]) == 2
    assert not harm.exists()
