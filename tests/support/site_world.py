"""Several worlds side by side, each a site of one training, started as one world.

The first ranks become site 0, the next ones site 1, and so on. As a script it lets each process
train by train.py; its argument is a JSON file with `ports`, one for each site, `ranks`, how many
each has (absent: equally many), and the `arguments` of train.py by site.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def become_site(ports: Sequence[int], ranks: Sequence[int] | None = None) -> int:
    """Make this process a rank of the world of one site, of those that meet at `ports`."""
    sizes = ranks or [int(os.environ["WORLD_SIZE"]) // len(ports)] * len(ports)
    site, rank = 0, int(os.environ["RANK"])
    while rank >= sizes[site]:
        rank -= sizes[site]
        site += 1
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(sizes[site]),
        LOCAL_WORLD_SIZE=str(sizes[site]),
        MASTER_PORT=str(ports[site]),
    )
    return site


def main() -> int:
    from bigtrain.train import main as train

    request = json.loads(Path(sys.argv[1]).read_text())
    site = become_site(request["ports"], request.get("ranks"))
    return train(request["arguments"][site])


if __name__ == "__main__":
    sys.exit(main())
