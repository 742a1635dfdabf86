"""The questions of `accelerate config`, answered at a real terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pexpect

ACCELERATE = Path(sys.executable).with_name("accelerate")
SECONDS = 120
# A part of every question that is asked, and its answer: a number is a menu's row, a text is typed.
ANSWERS: Mapping[str, str | int] = {
    "In which compute environment": 0,
    "Which type of machine": 4,  # multi-GPU: DeepSpeed is not offered for multi-CPU
    "How many different machines": "1",
    "Should distributed operations be checked": "no",
    "torch dynamo": "no",
    "Do you want to use DeepSpeed": "yes",
    "specify a json file": "no",
    "ZeRO optimization stage": 2,
    "Where to offload optimizer": 0,
    "Where to offload parameters": 0,
    "How many gradient accumulation": "1",
    "use gradient clipping": "no",
    "save 16-bit model": "no",
    "deepspeed.zero.Init": "no",
    "Mixture-of-Experts": "no",
    "should be used for distributed training": "2",
    "use mixed precision": 0,
    "NUMA": "no",
}


def answer(config_file: Path, answers: Mapping[str, str | int]) -> Path:
    """Write `config_file` by the wizard, with `answers` replacing or extending `ANSWERS`.

    Fails with the contents of the screen if a question has no answer, or an answer no question.
    """
    child = pexpect.spawn(
        str(ACCELERATE),
        ["config", "--config_file", str(config_file)],
        env={**os.environ, "TERM": "dumb"},
        encoding="utf-8",
        timeout=SECONDS,
        dimensions=(50, 400),
    )
    child.delaybeforesend = 0.2  # a menu reads its keys only once it is drawn
    left = {**ANSWERS, **answers}
    while True:
        # A menu draws its question again at each key, so a question is looked for once.
        questions = [*left, pexpect.EOF]
        question = questions[child.expect_exact(questions)]
        if question is pexpect.EOF:
            break
        reply = left.pop(question)
        if isinstance(reply, int):
            child.expect_exact("with enter")
            child.send(str(reply))
            child.send("\r")
        else:
            child.sendline(reply)
    child.close()
    screen = child.before
    assert child.exitstatus == 0, screen
    assert not left.keys() & answers.keys(), f"never asked: {left.keys() & answers.keys()}"
    return config_file
