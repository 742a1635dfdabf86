"""Names of the Hugging Face Hub, and its cache on this machine. Pure: huggingface_hub takes a tenth
of a second to import."""

from __future__ import annotations

import os
import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}(/[\w.-]{1,96})?")


def is_hub_name(text: str) -> bool:
    """Return whether `text` can be a name on the Hub (NAME or OWNER/NAME); else it is a path."""
    return _NAME.fullmatch(text) is not None and ".." not in text and "--" not in text


def cached_hub_file(name: str, file: str) -> Path | None:
    """Return `file` of the newest version of the model `name` in the Hub's cache; None if it was
    never downloaded."""
    # The cache that huggingface_hub reads, by its variables.
    cache = os.environ.get("HF_HUB_CACHE", os.environ.get("HUGGINGFACE_HUB_CACHE"))
    if cache is None:
        default_home = os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
        cache = os.path.join(os.environ.get("HF_HOME", default_home), "hub")
    directory = Path(os.path.expandvars(cache)).expanduser()
    model_folder = directory / f"models--{name.replace('/', '--')}"
    try:
        revision = (model_folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    path = model_folder / "snapshots" / revision / file
    return path if path.is_file() else None
