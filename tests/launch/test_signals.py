"""What a scheduler or a person sends to a launcher: saved at the next step, and stopped."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from bigtrain.run.checkpointing import checkpoints
from tests.launch.conftest import Inputs, launch, launcher, metrics, start, trained, wait
from tests.support.worlds import ROOT

pytestmark = pytest.mark.timeout(600)

# Python runs it before train.py. A signal comes when WHEN is first imported, or written to.
SITECUSTOMIZE = """\
import os, sys
def hook(event, arguments):
    if event not in ("import", "open") or not hook.armed:
        return
    if event == "open" and "w" not in str(arguments[1]) and not arguments[2] & os.O_WRONLY:
        return
    if str(arguments[0]).endswith(os.environ["WHEN"]):
        hook.armed = False
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
hook.armed = True
sys.addaudithook(hook)
"""


@pytest.fixture
def signal_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """``signal_when("torch", signal.SIGUSR1)``: train.py gets it as that is imported."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{ROOT}")

    def set_up(when: str, number: int) -> None:
        monkeypatch.setenv("WHEN", when)
        monkeypatch.setenv("SIGNAL", str(int(number)))

    return set_up


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "received"),
    [
        (
            "bigtrain.settings.run_config",
            signal.SIGUSR1,
        ),  # where the run directory is not known yet
        ("deepspeed.runtime.engine", signal.SIGINT),
    ],
)
def test_a_signal_in_the_middle_of_imports(
    when: str,
    received: signal.Signals,
    signal_when: Callable[[str, int], None],
    inputs: Inputs,
    home: Path,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    signal_when(when, received)
    finished = launch(
        [*launcher("python"), "--config", inputs.run_yaml, f"output.directory={run}"], home
    )
    assert finished.code == 75, finished.output
    assert f"train.py: stopped by {received.name} before the first step" in finished.output
    assert "Traceback" not in finished.output
    if received == signal.SIGINT:  # of a person, who needs no marker
        assert not run.exists()
    else:
        assert [path.name for path in run.iterdir()] == ["requeue"]
        marker = json.loads((run / "requeue").read_text())
        assert marker == {"signal": received.name, "step": None}


def test_a_signal_while_a_wrong_run_is_refused(
    signal_when: Callable[[str, int], None], inputs: Inputs, home: Path, tmp_path: Path
) -> None:
    signal_when("bigtrain.settings.run_config", signal.SIGTERM)
    words = ["--config", inputs.run_yaml, f"output.directory={tmp_path / 'run'}", "optimizer.lrr=1"]
    finished = launch([*launcher("python"), *words], home)
    assert finished.code == 2
    assert "optimizer.lrr" in finished.output
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_signal_during_the_export(
    signal_when: Callable[[str, int], None],
    inputs: Inputs,
    home: Path,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    arguments = ["--config", inputs.run_yaml, f"output.directory={run}"]
    signal_when("generation_config.json", signal.SIGUSR1)
    finished = launch([*launcher("python"), *arguments], home)
    assert finished.code == 75, finished.output
    assert "stopped by SIGUSR1 after the last step" in finished.output
    assert (run / "requeue").exists()
    assert not (run / "hf").exists()
    trained(*arguments)
    assert (run / "hf" / "model.safetensors").exists()
    assert not (run / "requeue").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_stops_under_launcher(inputs: Inputs, home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--config", inputs.run_yaml, f"output.directory={run}", "train.steps=1000000"]
    process = start([*launcher("deepspeed"), *words, "evaluation.every_steps=1000000"], home)
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "step 3/" in line:
            # To all processes of the step or the terminal, launchers included, which pass it on.
            os.killpg(process.pid, signal.SIGTERM)
            break
    finished = wait(process)
    output = "".join(seen) + finished.output
    assert finished.code != 0, output  # launchers end with codes of their own
    step = checkpoints.list_steps(run)[-1]
    assert checkpoints.find_corruption(checkpoints.checkpoint_path(run, step), "all") is None
    assert max(metrics(run)) == step
    assert f"stopped by SIGTERM after step {step} of 1000000" in output
    assert (run / "requeue").exists()
    assert not (run / "hf").exists()
