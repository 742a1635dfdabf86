"""The road from a model that continues text to one that answers and stops by itself."""

from __future__ import annotations

import json
import random
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from bigtrain.cli import main as bigtrain
from tests.launch.conftest import Inputs, train, trained
from tests.launch.test_evaluation import TASKS, lines_of, lm_eval_figures, write_tasks
from tests.support.chats import turns
from tests.support.pages import page_blocks, page_files, page_text
from tests.support.worlds import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

PAGE = page_text("docs/howto/quickstart_chat.md")
FILES = page_files(PAGE)
GROW, TOKENIZE, TRAIN, GENERATE = map(shlex.split, page_blocks(PAGE)[0].splitlines())
END = "<|im_end|>"


def write_chats(path: Path, count: int) -> None:
    """Conversations of one to three questions, of which any model learns where answers end."""
    chance = random.Random(5)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            numbers = [chance.randrange(99) for _ in range(chance.randint(1, 3))]
            said = [text for n in numbers for text in (f"What comes after {n}?", f"{n + 1}.")]
            file.write(json.dumps({"messages": turns(*said)}) + "\n")


def begin(place: Path, base: Path) -> None:
    """A folder with the files of the page, conversations, and a base model where it is named."""
    for name, content in FILES.items():
        (place / name).write_text(content)
    for name in ("bigtrain", "ds_configs"):
        (place / name).symlink_to(ROOT / name)
    write_chats(place / "chats.jsonl", 400)
    shutil.copytree(base, place / "runs/quickstart/run/hf")


def new_tokens(directory: Path, question: str) -> list[int]:
    """What plain transformers answers, greedily, with the export's own settings."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=100, do_sample=False)
    return [int(token) for token in output[0, prompt.input_ids.shape[1] :]]


def talk(place: Path, *more: str) -> str:
    """Train as the page does, with the tiny base."""
    here = [
        f"model.path={place / 'runs/quickstart/run/hf'}",
        f"data.path={place / 'talk-shards'}",
        f"output.directory={place / 'runs/talk'}",
        *("batch.sequence_length=64", "optimizer.lr=1.0e-2", "evaluation.every_steps=null"),
    ]
    return trained("--config", place / "talk.yaml", *here, *more)


def test_the_template_of_the_conversations_of_a_mixture_is_exported(
    inputs: Inputs, tmp_path: Path
) -> None:
    """Also where they are not its first source."""
    write_chats(tmp_path / "chats.jsonl", 60)
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    words = ["tokenize", "--input", tmp_path / "chats.jsonl", "--output", tmp_path / "chats"]
    words += ["--tokenizer", inputs.tokenizer, "--chat-template", tmp_path / "chat.jinja"]
    assert bigtrain(list(map(str, words))) == 0
    sources = [{"path": str(path), "weight": 1} for path in (inputs.shards, tmp_path / "chats")]
    run = tmp_path / "run"
    done = train(
        *("--config", inputs.run_yaml, f"data={json.dumps({'sources': sources})}"),
        *("data.packing=best_fit", "train.steps=2", f"output.directory={run}"),
    )
    assert done.code == 0, done.output
    exported = (run / "hf" / "chat_template.jinja").read_text()
    assert exported == (tmp_path / "chat.jinja").read_text()


@pytest.mark.slow
def test_a_chat_stops_by_itself(
    inputs: Inputs,
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The page with the tiny model of these tests, in this process but for the training; and
    lm-eval, which is asked by the chat template, says the same of the export as in the loop."""
    pytest.importorskip("lm_eval")
    begin(tmp_path, finished_run / "hf")
    monkeypatch.chdir(tmp_path)
    assert bigtrain(GROW[1:]) == 0
    assert bigtrain(TOKENIZE[1:]) == 0
    assert TRAIN[:2] == ["python", "bigtrain/train.py"]
    tasks = write_tasks(tmp_path / "tasks")
    more = ["tasks_chat=true", "tasks_fewshot=1", f"tasks_directory={tasks}"]
    more += [f"tasks=[{','.join(TASKS)}]"]
    output = talk(tmp_path, *(f"evaluation.{setting}" for setting in more))
    assert "vocabulary grown from 320 to 322 rows" in output
    capsys.readouterr()
    assert bigtrain(GENERATE[1:]) == 0
    answer = capsys.readouterr().out
    new = new_tokens(tmp_path / "runs/talk/hf", GENERATE[-1])
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "runs/talk/hf")
    assert 0 < len(new) < 100
    assert tokenizer.convert_ids_to_tokens(new[-1]) == END
    assert answer == tokenizer.decode(new[:-1]) + "\n"
    names: dict[str, Any] = {}
    (code,) = page_blocks(PAGE, "python")
    exec(compile(code, "the page", "exec"), names)
    assert capsys.readouterr().out.endswith(f"assistant\n{answer.strip()}{END}\n")
    (line,) = [one for one in lines_of(tmp_path / "runs/talk/metrics.jsonl") if "tasks" in one]
    chat: dict[str, Any] = {"apply_chat_template": True, "fewshot_as_multiturn": True}
    expected = lm_eval_figures(tmp_path / "runs/talk/hf", tasks, num_fewshot=1, **chat)
    assert line["tasks"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_an_answer_that_the_next_role_ends(
    inputs: Inputs,
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """GLM-4.5's template writes no end of an answer: the token of the next role is learned, and is
    an end token of the export, so that plain transformers stops."""
    begin(tmp_path, finished_run / "hf")
    monkeypatch.chdir(tmp_path)
    glm = ROOT / "tests/data/chat_templates/glm4moe.jinja"
    roles = ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "[gMASK]", "<sop>"]
    settings = (tmp_path / "talk.yaml").read_text().replace('"<|im_start|>", "<|im_end|>"', "NEW")
    (tmp_path / "talk.yaml").write_text(settings.replace("NEW", json.dumps(roles)[1:-1]))
    assert bigtrain(GROW[1:]) == 0
    assert bigtrain([str(glm) if word == "chat.jinja" else word for word in TOKENIZE[1:]]) == 0
    talk(tmp_path)
    capsys.readouterr()
    hf = tmp_path / "runs/talk/hf"
    tokenizer: Any = AutoTokenizer.from_pretrained(hf)
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    assert user in json.loads((hf / "generation_config.json").read_text())["eos_token_id"]
    new = new_tokens(hf, GENERATE[-1])
    assert 0 < len(new) < 100
    assert new[-1] == user
    assert bigtrain([*GENERATE[1:3], str(hf), *GENERATE[4:]]) == 0
    assert "<|user|>" not in capsys.readouterr().out
