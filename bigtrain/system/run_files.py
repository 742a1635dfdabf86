"""Names of what a run writes into its directory, for readers of directories that hold other files,
too. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

RUN_ID = "run_id"
"""File of every run directory, written before all others but the folder ``generations``."""
RUN_TEXTS = ("log.txt", "metrics.jsonl", "starts.jsonl")
RUN_FOLDERS = (
    *("base", "checkpoints", "generations", "hangs", "hf", "model_config", "outer_server"),
    *("profile", "reference", "tokenizer"),
)


def run_files(names: Iterable[str], is_run: Callable[[str], bool]) -> list[str]:
    """Return those of `names`, paths of files with slashes, that a run has written: its texts and
    folders in a folder for which `is_run` (of its path, empty for the folder of `names`)."""
    found = []
    for name in names:
        *folders, file = name.split("/")
        candidates = [n for n, folder in enumerate(folders) if folder in RUN_FOLDERS]
        candidates += [len(folders)] if file in RUN_TEXTS else []
        if any(is_run("/".join(folders[:number])) for number in candidates):
            found.append(name)
    return found
