"""Options of other programs are answered with how the setting is written here."""

from __future__ import annotations

import pytest

from bigtrain import train
from bigtrain.cli import main

PROGRAMS = {"check": lambda words: main(["check", *words]), "train.py": train.main}
ANSWERS = {
    "--learning_rate=1e-3": "written optimizer.lr=VALUE",
    "--per-device-train-batch-size=4": "written batch.micro_batch_size=VALUE",
    "--optimizer.lr=1e-3": "written optimizer.lr=VALUE",
    "--num_train_epochs=3": "written train.epochs=VALUE",
    "--unheard_of=1": "written section.key=VALUE",
}


@pytest.mark.parametrize("option", ANSWERS)
def test_an_option_of_another_program_names_the_setting(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for program in PROGRAMS.values():
        with pytest.raises(SystemExit) as caught:
            program(["--config", "quickstart", option])
        assert caught.value.code == 2
        assert ANSWERS[option] in capsys.readouterr().err


def test_a_command_without_settings_does_not_speak_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "somewhere", "--learning_rate=1e-3"])
    assert "unrecognized arguments: --learning_rate" in (text := capsys.readouterr().err)
    assert "setting" not in text
