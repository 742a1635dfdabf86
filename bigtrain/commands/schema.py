"""`bigtrain schema`: the JSON schema of the run YAML, for editors."""

from __future__ import annotations

from dataclasses import dataclass

from bigtrain.errors import OutputError
from bigtrain.system.arguments import File


@dataclass(frozen=True, kw_only=True)
class SchemaArguments:
    """Command line of `bigtrain schema`."""

    output: File | None = None
    """write it there, for a line `# yaml-language-server: $schema=FILE` at the top of a run YAML
    (default: print it)"""


def run(args: SchemaArguments) -> int:
    """Print or write the schema. Raises OutputError."""
    from bigtrain.settings.commented_yaml import schema_text

    if args.output is None:
        print(schema_text(), end="")
        return 0
    try:
        args.output.write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--output = {args.output}: cannot be written: {error}") from error
    print(f"wrote {args.output}")
    return 0
