"""A `bigtrain` command in another directory, as a rank: `command_worker.py DIRECTORY COMMAND ...`.

With BIGTRAIN_KILL_AFTER=N the rank ends as if killed, after N files that ended with ``.json``.
"""

from __future__ import annotations

import os
import sys

from bigtrain.cli import main


def end_after(count: int) -> None:
    """End this process when so many files with the name of a record have been written."""
    seen = 0

    def look(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event == "os.rename" and str(arguments[1]).endswith(".json"):
            seen += 1
            if seen > count:
                os._exit(9)

    sys.addaudithook(look)


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    if "BIGTRAIN_KILL_AFTER" in os.environ:
        end_after(int(os.environ["BIGTRAIN_KILL_AFTER"]))
    code = main(sys.argv[2:])
    if code:
        print(f"exit code {code}", flush=True)
        os._exit(code)
