"""The kernels of one step as JSON: ``python -m benchmarks.gpu_roofline.traced_step POINT``, with
``--before`` those of the code that was measured, in which DeepSpeed's BF16_Optimizer did the
update. For a list of points, each with its number of GPUs, a line for each: ``[[POINT, 8], ...]``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.gpu_proof.fake_cuda import load_before_torch


def main() -> None:
    """Print the kernels of a step at the point, or the points, that the first argument is."""
    load_before_torch()
    # What all steps need, imported once.
    from benchmarks.gpu_roofline import contenders  # noqa: F401

    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    values = json.loads(sys.argv[1])
    if isinstance(values, Mapping):
        _answer(values, 1, answers)
    for point, num_ranks in values:
        child = os.fork()
        if child == 0:
            _answer(point, num_ranks, answers)
        if os.waitpid(child, 0)[1] != 0:
            os._exit(1)
    os._exit(0)


def _answer(values: Mapping[str, Any], num_ranks: int, answers: int) -> None:
    """Write the kernels of a step to the file `answers`, and end this process."""
    from benchmarks.gpu_roofline.contenders import record_step
    from benchmarks.support.points import Point

    code = 1
    try:
        point = Point(**{**values, "contenders": tuple(values["contenders"])})
        kernels = record_step(point, num_ranks, is_before="--before" in sys.argv)
        with os.fdopen(answers, "w") as file:
            file.write(json.dumps([asdict(kernel) for kernel in kernels]) + "\n")
        code = 0
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)  # threads of the fake process group do not end


if __name__ == "__main__":
    main()
