"""Several worlds side by side, each a site of one training, started as one world.

The first ranks become site 0, the next ones site 1, and so on. As a script it lets each process
train by train.py; its argument is a JSON file with `ports`, one for each site, and the `arguments`
of train.py by site.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def become_site(ports: Sequence[int]) -> int:
    """Make this process a rank of the world of one site, of those that meet at `ports`."""
    ranks = int(os.environ["WORLD_SIZE"]) // len(ports)
    site, rank = divmod(int(os.environ["RANK"]), ranks)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_PORT=str(ports[site]),
    )
    return site


def main() -> int:
    from bigtrain.train import main as train

    request = json.loads(Path(sys.argv[1]).read_text())
    site = become_site(request["ports"])
    return train(request["arguments"][site])


if __name__ == "__main__":
    sys.exit(main())
