"""Two sites that train by train.py with the direct exchange: what they write, a resume in a window,
what is refused."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bigtrain import cli
from bigtrain.errors import ModelError
from bigtrain.python_api.results import export_run, merge_run, verify_model
from bigtrain.run.checkpointing import checkpoints
from tests.launch.conftest import STEPS, Inputs, metrics
from tests.support import site_world
from tests.support.lives import shared_server
from tests.support.outer_servers import outer_server
from tests.support.worlds import held_ports

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

INNER_STEPS = 5
MIDDLE = 8
"""A step with a checkpoint that is none of an outer step."""


def train_sites(
    inputs: Inputs,
    directory: Path,
    own: Sequence[Sequence[str]] = ((), ()),
    *settings: str,
    die: tuple[int, int] | None = None,
    ranks: Sequence[int] | None = None,
    window_seconds: float = 30.0,
    **more: Any,
) -> tuple[list[int], str]:
    """Two sites of one rank each, or of so many `ranks`; exit codes by rank and all that they
    printed. `own`: settings of each site."""
    ranks = ranks or [1] * len(own)
    server = outer_server(directory / "server", window_seconds=window_seconds)
    with held_ports(len(own)) as ports, server as meeting:
        reach = [f"sites.{key}={value}" for key, value in meeting.items()]
        settings = (*reach, *settings)
        return train_sites_at(
            ports, inputs, directory, own, *settings, die=die, ranks=ranks, **more
        )


def train_sites_at(
    ports: Sequence[int],
    inputs: Inputs,
    directory: Path,
    own: Sequence[Sequence[str]],
    *settings: str,
    die: tuple[int, int] | None,
    ranks: Sequence[int],
    **more: Any,
) -> tuple[list[int], str]:
    """As `train_sites`, with the settings of a server; ports: of each one's world."""
    common = [
        "engine.deepspeed_config=zero1",
        "sites.count=2",
        f"sites.inner_steps={INNER_STEPS}",
        "sites.exchange=direct",
        "sites.timeout_seconds=60",
        *settings,
    ]
    common = ["--config", str(inputs.run_yaml), *common]
    places = [
        [f"sites.index={index}", f"output.directory={directory / str(index)}"]
        for index in range(len(own))
    ]
    arguments = [[*common, *place, *of_site] for place, of_site in zip(places, own, strict=True)]
    request = directory / "request.json"
    document = {"ports": list(ports), "ranks": list(ranks), "arguments": arguments}
    request.write_text(json.dumps(document))
    script = [site_world.__file__, str(request)]
    return shared_server().live(
        [], script=script, world_size=sum(ranks), grace_seconds=30.0, die=die, **more
    )


def outer_lines(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "outer_step" in line and "event" not in line]


@pytest.fixture(scope="module")
def trained(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sites")
    codes, output = train_sites(inputs, directory)
    assert codes == [0, 0], output
    return directory


def test_outer_steps_are_written_down_and_bytes_are_those_of_the_formula(trained: Path) -> None:
    weights = load_file(trained / "0" / "hf" / "model.safetensors")
    num_elements = sum(weight.numel() for weight in weights.values())
    for site in ("0", "1"):
        lines = outer_lines(trained / site)
        assert [line["step"] for line in lines] == [5, 10, STEPS]
        assert [line["outer_step"] for line in lines] == [1, 2, 3]
        for line in lines:
            assert line["sites"] == [0, 1]
            assert line["sent_bytes"] == 2 * -(-num_elements // 2) * 4
            assert line["seconds"] >= line["waited_seconds"] >= 0
            assert line["change"] > line["distance"] > 0
    state = checkpoints.read_state(checkpoints.checkpoint_path(trained / "0", STEPS))
    assert state["outer_steps"] == 3
    assert state["samples"] == STEPS * 8  # of both


def test_sites_read_other_samples_and_end_with_the_same_weights(trained: Path) -> None:
    assert metrics(trained / "0", "loss") != metrics(trained / "1", "loss")
    first, second = (load_file(trained / site / "hf" / "model.safetensors") for site in "01")
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name


@pytest.mark.slow
def test_goes_on_in_the_middle_of_a_window(trained: Path, inputs: Inputs, tmp_path: Path) -> None:
    for site in ("0", "1"):
        shutil.copytree(trained / site, tmp_path / site)
        checkpoints.remove(checkpoints.checkpoint_path(tmp_path / site, STEPS))
        shutil.rmtree(tmp_path / site / "hf")
    codes, output = train_sites(inputs, tmp_path)
    assert codes == [0, 0], output
    assert output.count(f"resumed at step {MIDDLE} ") == 2
    for site in ("0", "1"):
        for key in (
            "loss",
            "outer_step",
            "grad_norm",
            "held_out_loss",
            "change",
            "distance",
            "sent_bytes",
        ):
            assert metrics(tmp_path / site, key) == metrics(trained / site, key), key
        weights_by_name = load_file(tmp_path / site / "hf" / "model.safetensors")
        for name, weight in load_file(trained / site / "hf" / "model.safetensors").items():
            assert torch.equal(weights_by_name[name], weight), name


def events(run: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["event"], line["who"]) for line in lines if "who" in line]


def assert_same_weights(directory: Path, *sites: str) -> None:
    first, *others = (load_file(directory / site / "hf" / "model.safetensors") for site in sites)
    for weights in others:
        for name, weight in first.items():
            assert torch.equal(weights[name], weight), name


@pytest.mark.parametrize("how", ["master", pytest.param("unchecked", marks=pytest.mark.slow)])
def test_a_site_with_a_weight_that_is_not_finite_is_left_out(
    inputs: Inputs, tmp_path: Path, how: str
) -> None:
    """It ends, or, where it does not check what it sends, the other one finds it out."""
    settings = ["sites.codec=int8", "sites.timeout_seconds=20", "guard.enabled=false"]
    spoil = {"rank": 1, "steps": {"10": how}}
    codes, output = train_sites(
        inputs, tmp_path, ((), ()), *settings, spoil=spoil, window_seconds=10.0
    )
    assert codes == [0, 2], output
    assert "Traceback" not in output
    lines = outer_lines(tmp_path / "0")
    assert [line["sites"] for line in lines] == [[0, 1], [0], [0]]
    assert ("site_left_out", "site 1") in events(tmp_path / "0")
    if how == "master":
        assert "step 10: site 1 would send the other sites a change with NaN" in output
        assert "outer step 2: site 1 is left out: a change with NaN or an infinity" in output
    else:
        assert "site 1 is left out: sent values that are not finite, or moved too far" in output
    assert max(checkpoints.list_steps(tmp_path / "1")) == MIDDLE
    weights = load_file(tmp_path / "0" / "hf" / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())


@pytest.mark.slow
def test_sites_with_other_layouts_and_a_resume_on_yet_others(
    trained: Path, inputs: Inputs, tmp_path: Path
) -> None:
    """They end where sites of one rank do, but for rounding; in the middle of a window they resume
    with each other's layouts."""
    layouts = [
        ["engine.deepspeed_config=zero2", "batch.micro_batch_size=1"],
        ["engine.deepspeed_config=zero1"],
    ]
    codes, output = train_sites(inputs, tmp_path, layouts, ranks=[2, 1])
    assert codes == [0, 0, 0], output
    assert "sites differ in layout (2, 1 ranks): they exchange by rectangles" in output

    def weights(directory: Path, site: str) -> dict[str, torch.Tensor]:
        weights_by_name: dict[str, torch.Tensor] = load_file(
            directory / site / "hf" / "model.safetensors"
        )
        return weights_by_name

    first = weights(tmp_path, "0")
    expected = weights(trained, "0")
    for name, weight in weights(tmp_path, "1").items():
        assert torch.equal(weight, first[name]), name
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-4)
    for site in "01":
        checkpoints.remove(checkpoints.checkpoint_path(tmp_path / site, STEPS))
        shutil.rmtree(tmp_path / site / "hf")
    codes, output = train_sites(inputs, tmp_path, layouts[::-1], ranks=[1, 2])
    assert codes == [0, 0, 0], output
    assert output.count(f"resumed at step {MIDDLE} ") == 2
    again = weights(tmp_path, "0")
    for name, weight in weights(tmp_path, "1").items():
        assert torch.equal(weight, again[name]), name
        torch.testing.assert_close(weight, first[name], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_resumes_with_another_number_of_sites(
    trained: Path, inputs: Inputs, tmp_path: Path
) -> None:
    """In the middle of a window; a new site begins with the checkpoint of another."""
    count = 4
    for site in range(count):
        shutil.copytree(trained / str(site % 2), tmp_path / str(site))
        checkpoints.remove(checkpoints.checkpoint_path(tmp_path / str(site), STEPS))
        shutil.rmtree(tmp_path / str(site) / "hf")
    settings = f"sites.count={count}", "checkpoint.allow_changes=[sites.count,sites.index]"
    codes, output = train_sites(inputs, tmp_path, [()] * count, *settings)
    assert codes == [0] * count, output
    assert output.count(f"resumed at step {MIDDLE} ") == count
    first = load_file(tmp_path / "0" / "hf" / "model.safetensors")
    for site in map(str, range(count)):
        last = outer_lines(tmp_path / site)[-1]
        assert last["sites"] == list(range(count))
        weights_by_name = load_file(tmp_path / site / "hf" / "model.safetensors")
        for name, weight in first.items():
            assert torch.equal(weights_by_name[name], weight), name
        state = checkpoints.read_state(checkpoints.checkpoint_path(tmp_path / site, STEPS))
        assert state["samples"] == STEPS * 8  # of all sites together, before and after


@pytest.mark.slow
def test_what_16_bit_engines_compute_with_is_the_global_weights(
    inputs: Inputs, tmp_path: Path
) -> None:
    """The export of the last step, an outer one, gives the trained engine's logits."""
    settings = ["precision.dtype=bfloat16", "engine.deepspeed_config=zero3"]
    settings += ["sites.outer.lr=1.4", "train.steps=5"]
    codes, output = train_sites(inputs, tmp_path, ((), ()), *settings)
    assert codes == [0, 0], output
    assert output.count("same logits") == 2


def come_back(
    inputs: Inputs, trained: Path, directory: Path, layouts: Sequence[Sequence[str]], *ranks: int
) -> None:
    """Site 0 resumes after its first outer step, where site 1 begins."""
    shutil.copytree(trained / "0", directory / "0")
    for step in checkpoints.list_steps(directory / "0"):
        if step != MIDDLE:
            checkpoints.remove(checkpoints.checkpoint_path(directory / "0", step))
    shutil.rmtree(directory / "0" / "hf")
    codes, output = train_sites(inputs, directory, layouts, ranks=ranks)
    assert set(codes) == {0}, output
    assert output.count(f"jumping to step {MIDDLE}, where the other sites are") == 1
    for site in "01":
        lines = outer_lines(directory / site)
        assert [(line["step"], line["sites"]) for line in lines][-2:] == [
            (10, [0, 1]),
            (STEPS, [0, 1]),
        ]
        assert events(directory / site) == [("site_returned", "site 1")]
    assert_same_weights(directory, "0", "1")


def test_a_site_that_is_behind_takes_the_global_weights(
    trained: Path, inputs: Inputs, tmp_path: Path
) -> None:
    come_back(inputs, trained, tmp_path, ((), ()), 1, 1)


@pytest.mark.slow
def test_a_site_that_comes_back_after_the_end_of_the_run_exports_nothing(
    trained: Path, inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the server of the run; site 0 has exported the weights of the run, and ends at once."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    checkpoints.remove(checkpoints.checkpoint_path(tmp_path / "1", STEPS))
    shutil.rmtree(tmp_path / "1" / "hf")
    (tmp_path / "1" / "exported.json").unlink()
    codes, output = train_sites(inputs, tmp_path, window_seconds=1.0)
    assert codes == [0, 2], output
    assert f"complete: the run is at step {STEPS} of {STEPS}; nothing to do" in output
    assert f"the run ended with outer step 3, after its last step {STEPS}, on site 0, and" in output
    assert max(checkpoints.list_steps(tmp_path / "1")) == MIDDLE
    for name in ("hf", "exported.json"):
        assert not (tmp_path / "1" / name).exists()
    record = json.loads((tmp_path / "0" / "exported.json").read_text())
    assert record == {"step": STEPS, "outer_step": 3, "sites": [0, 1]}
    # An export by hand says so, and does not pass as the export of the run.
    lines: list[str] = []
    export_run(tmp_path / "1", tmp_path / "of site 1", warn=lines.append)
    text = f"weights of site 1 of 2 after step {MIDDLE}, not the weights with which the run ended"
    assert [line for line in lines if text in line]
    verify_model(tmp_path / "0" / "hf")
    with pytest.raises(ModelError, match="has the weights of one site, not the weights with which"):
        verify_model(tmp_path / "of site 1")
    assert cli.main(["verify", "--run", str(tmp_path / "1")]) == 0
    assert f"{tmp_path / '1'}: {text}" in capsys.readouterr().out
    merge_run(tmp_path / "0", tmp_path / "mean", steps=[MIDDLE, STEPS], warn=lines.append)
    assert "weights of site 0 of 2 after step" in lines[-1]
    with pytest.raises(ModelError, match="has the weights of one site, not the weights with which"):
        verify_model(tmp_path / "mean")
    assert cli.main(["verify", "--run", str(tmp_path / "0")]) == 0
    assert "weights of site" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_site_with_another_layout_takes_the_global_weights(
    inputs: Inputs, tmp_path: Path
) -> None:
    settings = ["sites.codec=int8"]
    (tmp_path / "before").mkdir()
    codes, output = train_sites(inputs, tmp_path / "before", (settings, settings))
    assert codes == [0, 0], output
    layouts = [[*settings, "engine.deepspeed_config=zero1"]]
    layouts += [[*settings, "engine.deepspeed_config=zero2", "batch.micro_batch_size=1"]]
    come_back(inputs, tmp_path / "before", tmp_path, layouts, 1, 2)


@pytest.mark.slow
def test_sites_with_other_layouts_go_on_without_one_that_is_lost(
    inputs: Inputs, tmp_path: Path
) -> None:
    """The exchange by rectangles is opened anew between those that are left."""
    layouts = [
        ["engine.deepspeed_config=zero2", "batch.micro_batch_size=1"],
        ["engine.deepspeed_config=zero1"],
        ["engine.deepspeed_config=zero1"],
    ]
    settings = "sites.count=3", "batch.global_batch_size=12", "checkpoint.asynchronous=false"
    codes, output = train_sites(inputs, tmp_path, layouts, *settings, ranks=[2, 1, 1], die=(3, 12))
    assert codes == [0, 0, 0, -signal.SIGKILL], output
    for site in "01":
        assert [line["sites"] for line in outer_lines(tmp_path / site)] == [[0, 1]] * 3
        assert events(tmp_path / site) == [("site_left_out", "site 2")]
    assert "sites differ in layout (2, 1, 1 ranks)" in output
    assert "sites differ in layout (2, 1 ranks)" in output
    assert_same_weights(tmp_path, "0", "1")
