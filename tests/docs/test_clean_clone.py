"""Every command line of README.md and the docs, in the reader's order, in one clean clone.

`make quickstart` first, then README.md, then the pages as the navigation lists them. A line that
was typed before is not typed again. What is not typed here is listed below, each with its reason,
and the fast tests fail for a line that is no command, and for an entry without a line.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chats import write_readme_chats
from tests.support.lives import Server
from tests.support.pages import page_files, page_text
from tests.support.worlds import ROOT, default_port

# A line is a command where it begins with one of these, after assignments of variables.
PROGRAMS = {
    "accelerate", "bash", "bigtrain", "deepspeed", "docker", "eval", "export", "kubectl", "make",
    "pip", "python", "sbatch", "srun", "tail", "torchrun", "zcat",
}  # fmt: skip
# Blocks of pages that hold a drawing instead.
DRAWINGS = {"docs/reference/checkpoint_format.md", "docs/architecture.md"}

NOT_HERE = {
    r"^make (test|check|docs|install)\b": "installs, or runs all tests, of which this is one",
    r"pip install .*(ninja|no-build-isolation)": "downloads; tests/architecture/test_wheel.py",
    r"^make gpu-(check|wheels)": "needs a GPU, or fetches wheels for one",
    r"^make operator-proof": "fetches 1 GB; tests/unit/benchmarks/test_operator_proof.py",
    r"^(\w+=\S+ )*(sbatch|srun) ": "needs Slurm; tests/cluster/test_slurm.py submits to it",
    r"^bigtrain (doctor|hostfile) .*--slurm": "needs a Slurm job; tests/cluster/test_slurm.py",
    r"--hostfile hostfiles/mine": "needs several hosts; tests/cluster/test_hostfile.py has them",
    r"^kubectl ": "needs a Kubernetes cluster; tests/cluster/test_image.py starts the pods",
    r"^docker ": "needs docker; tests/cluster/test_image.py builds the image without it",
    r"^bash RUN\.torchrun\.sh": "waits for other hosts; tests/cluster/test_elastic.py has them",
    r"^accelerate (config|launch bigtrain/train\.py --config RUN)": "asks for the machine's GPUs; "
    "tests/cluster/test_accelerate.py answers it",
    r"(--config lora\.yaml|--run runs/q?lora|--adapters runs/)": "an 8B of the hub on eight GPUs; "
    "tests/launch/test_adapters.py trains, exports and merges a small one",
}
ELSEWHERE = {
    r"^make gpu-proof": "tests/unit/benchmarks/test_gpu_proof.py",  # minutes
    r"^make gpu-roofline": "tests/unit/benchmarks/test_gpu_roofline.py",  # minutes
    r"^bigtrain parity ": "tests/parity/test_parity_command.py",  # minutes each
    r"^bigtrain report .*--live": "tests/docs/test_howto_report.py",  # until Ctrl-C
    r"^bigtrain outer-server |sites\.server=": "tests/launch/test_outer_server.py",  # until Ctrl-C
    r"--compare-with http": "tests/unit/models/test_served.py",  # needs a server
    r"^bigtrain manifest data/": "tests/unit/data/tokenize_job/test_megatron.py",  # their files
    r"^bigtrain init$": "tests/unit/commands/test_init.py",  # asks
    r"^bigtrain start ": "tests/launch/test_start.py",  # a model of the hub
}
# What these name is a model of eight GPUs, a base model, an object store, data of five formats: a
# test of its own makes that at a tiny size.
PAGES_ELSEWHERE = {
    "docs/howto/what_do_i_type.md": "tests/docs/test_what_do_i_type.py",
    "docs/howto/your_data.md": "tests/docs/test_howto_data.py",
    "docs/howto/object_stores.md": "tests/docs/test_howto_data.py",
    "docs/howto/vocabulary.md": "tests/launch/test_vocabulary.py",
    "docs/howto/evaluation.md": "tests/launch/test_evaluation.py",
    "docs/howto/extend.md": "tests/docs/test_howto_extend.py",
    "docs/howto/objectives.md": "tests/docs/test_howto_objectives.py",
    "docs/howto/scores.md": "tests/docs/test_howto_scores.py",
    "docs/howto/long_samples.md": "tests/docs/test_howto_long_samples.py",
    "docs/howto/container.md": "tests/cluster/test_image.py",
    "docs/howto/llama_cpp.md": "tests/launch/test_gguf.py",
    "docs/howto/hybrid.md": "tests/docs/test_howto_hybrid.py",
    "docs/howto/convert.md": "tests/unit/settings/conversion/test_public_files.py",
}


class _Loader(yaml.SafeLoader):
    """mkdocs.yml without the objects of its extensions."""


@cache
def pages() -> tuple[str, ...]:
    """README.md, and the pages in the order of the navigation."""
    tree = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=_Loader)["nav"]

    def walk(node: Any) -> Iterator[str]:
        if isinstance(node, str):
            yield f"docs/{node}"
        for item in node.values() if isinstance(node, dict) else node:
            if not isinstance(node, str):
                yield from walk(item)

    return ("README.md", *walk(tree))


def text_of(page: str) -> str:
    """With the files that it includes."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.sub(r'--8<-- "(.*?)"', lambda match: (ROOT / match[1]).read_text(), text)


@cache
def lines(page: str) -> tuple[str, ...]:
    """The command lines of a page's code blocks, without comments."""
    commands = []
    for language, block in re.findall(
        r"^ *```(\w*)\n(.*?)^ *```$", text_of(page), flags=re.M | re.S
    ):
        if language not in ("", "bash", "sh", "console") or page in DRAWINGS:
            continue
        for line in re.sub(r" *\\\n *", " ", block).splitlines():
            for part in re.split(r" && ", re.sub(r"(^| )#.*", "", line)):
                if part.strip():
                    commands.append(part.strip())
    return tuple(commands)


def listed(line: str) -> str | None:
    """Why a line is not typed here; None if it is."""
    for pattern, reason in (*NOT_HERE.items(), *ELSEWHERE.items()):
        if re.search(pattern, line):
            return reason
    return None


def words_of(line: str) -> list[str]:
    words = shlex.split(line)
    while words and re.fullmatch(r"\w+=.*", words[0]):
        del words[0]
    return words


def test_every_line_is_a_command() -> None:
    for page in pages():
        for line in lines(page):
            assert words_of(line)[0] in PROGRAMS, f"{page}: {line}"


def test_what_is_not_typed_here_has_a_reason_that_is_still_needed() -> None:
    known = [line for page in pages() for line in lines(page)]
    for pattern in (*NOT_HERE, *ELSEWHERE):
        assert any(re.search(pattern, line) for line in known), f"no line any more: {pattern}"
    for reason in (*NOT_HERE.values(), *ELSEWHERE.values(), *PAGES_ELSEWHERE.values()):
        for path in re.findall(r"tests/\S+?(?=[;,. ]|$)(?:\.py)?", reason):
            assert (ROOT / path).exists(), path
    typed = [line for line in known if listed(line) is None]
    assert len(typed) > len(known) / 2


def make_reader(folder: Path) -> None:
    """What a reader has of their own: texts, conversations, a run YAML, hosts."""
    (folder / "texts").mkdir()
    for number, source in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        (folder / "texts" / f"{number}.txt").write_bytes(source.read_bytes())
    (run,) = re.findall(r"^```yaml\n(.*?)^```", text_of("README.md"), flags=re.M | re.S)
    (folder / "RUN.yaml").write_text(run)
    (folder / "hostfiles/mine").write_text("localhost slots=2\n")
    for name, content in page_files(page_text("docs/howto/quickstart_chat.md")).items():
        (folder / name).write_text(content)
    write_readme_chats(folder)


def clone(target: Path) -> Path:
    """The files that git has or would take, as they are now, and this environment as .venv."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    (target / ".venv").symlink_to(sys.prefix)
    return target


def type_in(folder: Path, line: str) -> str:
    """Type a line into a shell in `folder`; returns what it said."""
    environment = {
        **os.environ,
        **variables_of(folder),
        "PATH": f"{folder}/.venv/bin{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
    }
    with default_port() if "deepspeed " in line else nullcontext():
        done = subprocess.run(
            ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True
        )
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{line}\n{said[-6000:]}"
    return said


def variables_of(folder: Path) -> dict[str, str]:
    return {"HOME": str(folder.parent / "home"), "HF_HUB_OFFLINE": "1"}


def call(server: Server, line: str) -> None:
    """Run a line of `bigtrain` in a forked process of the clone, which costs no imports."""
    worker = str(server.checkout / "tests/launch/command_worker.py")
    script = [worker, str(server.checkout), *shlex.split(line)[1:]]
    codes, said = server.live([], script=script, world_size=1)
    assert codes == [0], f"{line}\n{said[-6000:]}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_docs_from_their_top_in_a_clean_clone(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    folder = clone(tmp_path / "clone")
    # The environment is there: `make install` is not to write into it.
    said = type_in(folder, "make -o .venv/.installed quickstart")
    assert "resumed at step" in said
    assert "the same command continues from the newest checkpoint" in said
    make_reader(folder)
    typed: set[str] = {"make quickstart"}
    failed = []
    (tmp_path / "lives").mkdir()
    server = Server(tmp_path / "lives", variables_of(folder), folder)
    for page in pages():
        for script in set(folder.glob("RUN.*")) - {folder / "RUN.yaml"}:
            script.unlink()  # that another page's reader has made
        for line in () if page in PAGES_ELSEWHERE else lines(page):
            if line in typed or listed(line) is not None:
                continue
            typed.add(line)
            is_quick = re.match("bigtrain (?!doctor|plan --calibrate)", line)
            try:
                call(server, line) if is_quick and page != "README.md" else type_in(folder, line)
            except AssertionError as error:
                failed.append(f"{page}: {error}")
    server.close()
    assert failed == [], "\n\n".join(failed)
    for run in ("quickstart/run", "one", "two", "three", "chat", "talk"):
        assert (folder / "runs" / run / "hf/config.json").is_file()
    assert (folder / "exported/model.safetensors").is_file()
