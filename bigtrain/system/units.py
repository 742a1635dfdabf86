"""Sizes of units and dtypes. Pure."""

from __future__ import annotations

GIB = 2**30

DEEPSPEED_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""DeepSpeed's names of the dtypes of a run."""

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Dtypes of a run, by their short names."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element, by the run's and DeepSpeed's names."""
