"""Start the check of a GPU: `make gpu-check`, or without make:

    python3 tools/gpu_check.py --minutes 9.3 --output checked/

Where the checkout has wheels (``.gpu-wheels/``, made by `tools/gpu_wheels.py`), they are installed
first, without a network, into a folder of their own, which comes before the machine's packages;
torch is the machine's. All arguments are those of `benchmarks/gpu_check/runner.py`. Imports nothing
but the standard library, since there is nothing else yet.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / ".gpu-wheels"


def install(wheels: Sequence[Path], parent: Path) -> Path:
    """Return a folder below `parent` that holds exactly `wheels`; made once for the same ones."""
    digest = hashlib.sha256("\n".join(wheel.name for wheel in wheels).encode()).hexdigest()[:12]
    target = parent / f"gpu-check-packages-{digest}"
    done = target / ".complete"
    if not done.exists():
        words = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
        words += ["--upgrade", "--target", str(target), *map(str, wheels)]
        subprocess.run([sys.executable, "-m", "pip", "install", *words], check=True)
        done.touch()
    return target


def environment_for(packages: Path | None) -> dict[str, str]:
    """Return the environment of the check: the checkout and `packages` come first, and this
    Python's programs."""
    given = os.environ.get("PYTHONPATH", "")
    places = [str(ROOT), *([str(packages)] if packages else []), *([given] if given else [])]
    programs = str(Path(sys.executable).parent)  # DeepSpeed looks for ninja on PATH
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(places),
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", "")]),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Cached facts about this checkout must not reach a user's cache.
        "BIGTRAIN_CACHE": os.environ.get("BIGTRAIN_CACHE", tempfile.mkdtemp(prefix="gpu-check-")),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Install the wheels that are there, and run the check; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    begun = time.time()
    wheels = sorted(WHEELS.glob("*.whl"))
    packages = install(wheels, Path(tempfile.gettempdir())) if wheels else None
    if packages:
        print(f"{len(wheels)} wheels in {packages}, {time.time() - begun:.0f} s", flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu_check", *words, "--begun", f"{begun}"]
    return subprocess.run(command, cwd=ROOT, env=environment_for(packages), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
