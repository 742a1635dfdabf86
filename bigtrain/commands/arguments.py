"""Arguments that several commands have."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Annotated, Literal

from bigtrain.system.arguments import Argument
from bigtrain.system.units import SHORT_DTYPES

EXIT_CODES = (
    "Exit codes: 0 done; 2 a problem with the arguments or their files, reported in one "
    "message; 1 an error of bigtrain itself, with a traceback."
)
"""Epilog of every command's help."""

Config = Annotated[str, Argument(help="run YAML, or the name of a recipe")]
DeepSpeedConfig = Annotated[
    str | None,
    "NAME_OR_PATH",
    Argument(
        "--deepspeed_config",
        "--deepspeed-config",
        help="DeepSpeed JSON or its name in ds_configs/ (default: engine.deepspeed_config)",
    ),
]
Overrides = Annotated[
    tuple[str, ...],
    "section.key=value",
    Argument(
        "overrides",
        nargs="*",
        help="settings of the run to change, such as train.steps=20 (default: none)",
    ),
]
NewDirectory = Annotated[Path, Argument(help="directory to write")]


def dtype_name(text: str) -> str:
    """Return the dtype that `text` names, also by a short name, as in ``precision.dtype``."""
    return SHORT_DTYPES.get(text, text)


Dtype = Annotated[Literal["float32", "bfloat16", "float16"], dtype_name]


def shard_size(text: str) -> str:
    """Parse the largest size of a weight file, as transformers writes it."""
    if re.fullmatch(r"[1-9]\d*(KB|MB|GB|TB)", text.upper()) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return text.upper()
