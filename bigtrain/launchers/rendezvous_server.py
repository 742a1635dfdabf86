"""Server of the rendezvous of an elastic run, on a machine that outlives the run's nodes.

    python -m bigtrain.launchers.rendezvous_server HOST:PORT [ADDRESS]

It has no authentication, so it listens on one address only: ADDRESS, or HOST as resolved here.
Without such a server the agent of a node serves the rendezvous, and the run ends if that node dies.

SIGUSR1 announces that the run shall end when its ranks have stopped and saved: its agents do not
restart them. SIGINT and SIGUSR2 end the server; its exit code reports the run's result: 0 if it is
complete, 75 if it ended because fewer nodes were left than it needs, else 1.
"""

from __future__ import annotations

import signal
import socket
import sys

from bigtrain.errors import EXIT_STOPPED
from bigtrain.system.listening import listen_where_reached, try_port

ENDING, RESULT = "bigtrain/ending", "bigtrain/result"
"""Keys: present if ranks that have stopped are not to be restarted; how the run ended."""
COMPLETE, TOO_FEW_NODES = "complete", "too few nodes"
"""Values of `RESULT`."""
_EXIT_CODES = {COMPLETE: 0, TOO_FEW_NODES: EXIT_STOPPED}


def serve(host: str, port: int, address: str | None = None) -> int:
    """Serve on `port` of `address`, or of the address that `host` resolves to here, until a signal;
    return the exit code.

    If `host` resolves to a loopback address, which other nodes cannot reach, serve on all addresses
    of this machine. Returns 2 if the port or `address` cannot be used.
    """
    import torch.distributed as dist

    hostname = socket.gethostname()
    # Bind before the store is made, so that a port in use is an error of one line.
    try:
        try_port(port, may_be_bound=True)
        listener = listen_where_reached(address or host, port)
        if listener is None and address is not None:
            raise OSError(f"{address} is not an address of this machine")
        bound_address = listener.getsockname()[0] if listener is not None else "every address"
        store = dist.TCPStore(
            "localhost" if listener is None else bound_address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except (OSError, RuntimeError) as error:
        print(
            f"rendezvous: port {port} of {hostname} cannot be used: {error} -> stop the process "
            "that uses it, or give `bigtrain launch torchrun` another in --rendezvous",
            file=sys.stderr,
        )
        return 2
    # The launcher signals the end of the job by SIGUSR1, and ends the server by SIGUSR2.
    signal.signal(signal.SIGUSR1, lambda *_: store.set(ENDING, ""))
    signal.signal(signal.SIGUSR2, signal.default_int_handler)
    print(f"rendezvous: serving on port {store.port} of {hostname}, {bound_address}", flush=True)
    if listener is None:
        rule = (
            f"{host} does not resolve here to an address that nodes can reach, so every address "
            "is served"
        )
        remedy = "close those that nodes do not use with a firewall, or call it with serve ADDRESS"
        print(f"rendezvous: {rule} -> {remedy}", file=sys.stderr)
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        result = store.get(RESULT).decode() if store.check([RESULT]) else ""
        return _EXIT_CODES.get(result, 1)


if __name__ == "__main__":
    host_text, _, port_text = sys.argv[1].rpartition(":")
    sys.exit(serve(host_text.strip("[]"), int(port_text), *sys.argv[2:3]))
