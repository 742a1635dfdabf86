"""train.py, or the code of a file, in another directory: `extension_worker.py DIRECTORY ...`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    sys.path[:] = [path for path in sys.path if path not in ("", sys.argv[1])]
    if sys.argv[2] == "page":
        sys.path.insert(0, sys.argv[1])  # as `python FILE` does
        with open(sys.argv[3]) as file:
            exec(compile(file.read(), sys.argv[3], "exec"), {"__name__": "__main__"})
    else:
        from bigtrain.train import main

        code = main(sys.argv[2:])
        if code:
            print(f"exit code {code}", flush=True)
            os._exit(code)
