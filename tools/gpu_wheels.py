"""Fill a folder with the wheels that a GPU machine without a network lacks for `make gpu-check`.

    python tools/gpu_wheels.py            # into .gpu-wheels/, which git ignores

torch and most else are the machine's own; these are what it lacks or has too old (``CARRIED``),
for its Python, in the versions of constraints.txt. DeepSpeed is a source distribution: its wheel is
built here without operators, which are compiled where they are used, and so is for any machine.
Exit code 1 if a wheel is only for this machine, or checkout and wheels are larger than 64 MB.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".gpu-wheels"
LIMIT_BYTES = 64_000_000

CARRIED = {
    "annotated-types": "of pydantic",
    "deepspeed": "the machine has none",
    "hjson": "of deepspeed",
    "liger-kernel": "model.loss and model.kernels: liger",
    "orjson": "of bigtrain",
    "peft": "the machine has one, of an unknown version; adapters need 0.21.2",
    "pydantic": "of bigtrain and deepspeed",
    "pydantic-core": "of pydantic",
    "torchao": "precision.float8",
    "transformers": "the machine has 5.17; masks of packed documents need 5.23",
    "typing-extensions": "of pydantic, which needs 4.16",
    "typing-inspection": "of pydantic",
}
"""By name, and why."""

THERE = frozenset(
    {
        *("accelerate", "fsspec", "jinja2", "ninja", "numpy", "pyyaml", "safetensors"),
        *("tensorboard", "tokenizers", "torch", "tqdm", "xxhash"),
    }
)
"""Dependencies that the machine has, new enough (accelerate 1.15.0, numpy 2.5.2, safetensors 0.8.0,
tokenizers 0.23.2, torch 2.11.0, which needs fsspec, and huggingface_hub 1.33.0, as a session saw it
in 2026-11)."""

NOT_NEEDED = {
    "botocore": "reads profiles of the AWS CLI",
    "datasets": "reads text, which the check has none of",
    "fastokens": "encodes text",
    "gigatoken": "encodes text",
    "obstore": "reads and writes objects of stores",
    "requests": "reads web addresses",
    "shtab": "writes what lets shells complete",
    "zstandard": "`datasets` reads .zst files with it",
}
"""Dependencies that no line of the check imports, and why."""

_BUILT_HERE = {"deepspeed"}
# pip matches these exactly; see PEP 600.
_PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]


def version_of(name: str, constraints: Path = ROOT / "constraints.txt") -> str:
    """Return the version of constraints.txt. Raises SystemExit where it has none."""
    wanted = name.replace("-", "_").lower()
    for line in constraints.read_text().splitlines():
        match = re.fullmatch(r"([\w.-]+)==(\S+)", line.strip())
        if match and match[1].replace("-", "_").lower() == wanted:
            return match[2]
    raise SystemExit(f"{constraints}: no version of {name}")


def is_neutral(wheel: str) -> bool:
    """Return whether a wheel is for any Python 3 on any machine, by its name (PEP 427)."""
    return wheel.endswith(("-py3-none-any.whl", "-py2.py3-none-any.whl"))


def tree_bytes() -> int:
    """Return the bytes that git would carry: tracked files, and untracked ones that it does not
    ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return sum(path.lstat().st_size for path in paths if path.is_file())


def fetch(folder: Path, python_version: str) -> None:
    """Download what has wheels, and build what has none."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.whl"):  # two versions of one package would stop the installation
        old.unlink()
    pip = [sys.executable, "-m", "pip"]
    wanted = {name: f"{name}=={version_of(name)}" for name in CARRIED}
    downloaded = [wanted[name] for name in CARRIED if name not in _BUILT_HERE]
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    target = ["--python-version", python_version, "--implementation", "cp", *platforms]
    words = ["-q", "--no-deps", "--only-binary=:all:", *target, "-d", str(folder)]
    subprocess.run([*pip, "download", *words, *downloaded], check=True)
    built = [wanted[name] for name in CARRIED if name in _BUILT_HERE]
    subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), *built],
        env={**os.environ, "DS_BUILD_OPS": "0"},
        check=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the folder and list its contents; return the exit code."""
    parser = argparse.ArgumentParser(description="Wheels for make gpu-check without a network.")
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--python-version", default="3.12", help="of the GPU machine")
    args = parser.parse_args(argv)
    fetch(args.output, args.python_version)
    # The copy there has no history, and the check names the commit in its tables.
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    (args.output / "commit.txt").write_text(said)
    wheels = sorted(args.output.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:8.2f} MB  {wheel.name}")
    tree = tree_bytes()
    print(f"{size / 1e6:8.2f} MB  wheels, and {tree / 1e6:.2f} MB of checkout")
    problems = [
        f"{wheel.name} was built only for this machine"
        for wheel in wheels
        if wheel.name.split("-")[0] in _BUILT_HERE and not is_neutral(wheel.name)
    ]
    if len(wheels) != len(CARRIED):
        problems.append(f"there are {len(wheels)} wheels, not {len(CARRIED)}")
    if size + tree > LIMIT_BYTES:
        problems.append(f"together they are larger than {LIMIT_BYTES / 1e6:.0f} MB")
    for problem in problems:
        print(f"gpu_wheels.py: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
