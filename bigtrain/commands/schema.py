"""`bigtrain schema`: the JSON schema of the run YAML, for editors."""

from __future__ import annotations

import argparse

from bigtrain.errors import OutputError
from bigtrain.settings.commented_yaml import schema_text


def run(args: argparse.Namespace) -> int:
    """Print or write the schema. Raises OutputError."""
    if args.output is None:
        print(schema_text(), end="")
        return 0
    try:
        args.output.write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--output = {args.output}: cannot be written: {error}") from error
    print(f"wrote {args.output}")
    return 0
