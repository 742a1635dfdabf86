"""The kernels of one step as JSON: ``python -m benchmarks.gpu_roofline.traced_step POINT``, with
``--before`` those of the code that was measured, in which DeepSpeed's BF16_Optimizer did the
update."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

from benchmarks.gpu_proof.fake_cuda import load_before_torch


def main() -> None:
    """Print the kernels of a step at the point that the first argument is."""
    load_before_torch()
    from benchmarks.gpu_roofline.contenders import record_step
    from benchmarks.support.points import Point

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    values = json.loads(sys.argv[1])
    point = Point(**{**values, "contenders": tuple(values["contenders"])})
    kernels = record_step(point, is_before="--before" in sys.argv)
    answers.write(json.dumps([asdict(kernel) for kernel in kernels]) + "\n")
    answers.flush()
    os._exit(0)  # threads of the fake process group do not end


if __name__ == "__main__":
    main()
