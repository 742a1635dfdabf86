"""Common functions of the tools that write a file of the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def write_or_compare(target: Path, make_text: Callable[[], str], description: str) -> int:
    """Write `target`, or with --check report whether it differs; return the exit code."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    args = parser.parse_args()
    text = make_text()
    if not args.check:
        target.write_text(text, encoding="utf-8")
        print(f"wrote {target}")
        return 0
    same = target.is_file() and target.read_text(encoding="utf-8") == text
    tool = Path(sys.argv[0]).name
    print(f"{target}: {'up to date' if same else f'differs; run tools/{tool}'}")
    return 0 if same else 1
