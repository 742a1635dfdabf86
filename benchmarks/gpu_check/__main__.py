"""``python -m benchmarks.gpu_check``; see `runner.py`."""

import sys

from benchmarks.gpu_check.runner import main

sys.exit(main())
