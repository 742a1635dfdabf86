"""Serve the rendezvous of an elastic run on a machine that stays, whichever of its nodes die.

    python -m bigtrain.launch.rendezvous PORT

Without it the agent of one of the nodes serves, and the end of that node is the end of the run.
"""

from __future__ import annotations

import signal
import socket
import sys


def serve(port: int) -> int:
    """Serve on `port` of all addresses until SIGINT comes; 2 where the port cannot be used."""
    import torch.distributed as dist

    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
        # On all addresses of this machine, whatever it is called here.
        store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        print(
            f"rendezvous: port {port} of {socket.gethostname()} cannot be used: {error} -> end "
            "what holds it, or give `bigtrain launch torchrun` another in --rendezvous",
            file=sys.stderr,
        )
        return 2
    print(f"rendezvous: serving on port {store.port} of {socket.gethostname()}", flush=True)
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1])))
