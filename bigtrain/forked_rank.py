"""A rank that is forked from a process which has imported this module, with all that a run imports.

`bigtrain.launchers.fork_ranks` starts that process once for each agent, so that a restart of the
ranks does not import anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import bigtrain.engine.startup.late_imports
import bigtrain.run.training  # noqa: F401 - imported for its imports
from bigtrain.models.torch_patches import is_forked_from_cuda
from bigtrain.system.stop_signals import StopSignals
from bigtrain.train import main as train


def can_be_forked() -> bool:
    """Return whether a process that was forked from this one can run a rank: not if an import has
    initialized CUDA here."""
    return not is_forked_from_cuda()


def main(arguments: Sequence[str]) -> int:
    """Run train.py with `arguments` in this process; returns its exit code."""
    signals = StopSignals()
    signals.listen()
    return train(arguments, signals)
