"""torchrun, which says in plain words how a launch ended, and ends with its processes' exit code.

    python -m bigtrain.launch.agent TORCHRUN-ARGUMENTS

torchrun ends by a traceback and exit code 1 in each of these cases.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Launch, and return the exit code: that of the process that failed first, or 2."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

    options = run.parse_args(list(arguments))
    try:
        run.run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = int(failure.exitcode)
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        _say(f"process {rank} ended first, with {how}; what it said stands above")
        return code if code >= 0 else 128 - code
    except SignalException as error:
        _say(f"ended by {error.sigval.name}, which its processes got too: they say what they did")
        return 128 + int(error.sigval)
    except RendezvousClosedError:
        _say(
            f"the launch {options.rdzv_id} that met at {options.rdzv_endpoint} has ended, so this "
            "node cannot join it -> if the run is not complete, end whatever serves there, and "
            "start it and all nodes anew"
        )
        return 2
    except RendezvousError as error:
        _say(f"no meeting at {options.rdzv_endpoint}: {error} -> is it served there?")
        return 2
    return 0


def _say(text: str) -> None:
    print(f"torchrun: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
