"""One process of several worlds side by side, each a site of the same training.

Arguments: a JSON file with `ports` and `ranks` of `tests.support.site_world`, and by name one case
for each site; and a file by site for its main rank to write the results to.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from bigtrain.engine.startup.process_group import process_group
from bigtrain.errors import BigtrainError
from bigtrain.system.processes import exit_process
from bigtrain.system.world import read_world
from tests.parity.worker import run_case
from tests.support.site_world import become_site


def main() -> None:
    request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    site = become_site(request["ports"], request.get("ranks"))
    world = read_world(os.environ)
    results: dict[str, Any] = {}
    with process_group(world) as joined:
        for name, cases in request["cases"].items():
            try:
                results[name] = run_case(cases[site], world, joined.device)
            except BigtrainError as error:
                results[name] = {"error": str(error)}
    if world.is_main:
        Path(sys.argv[2 + site]).write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    exit_process(0)
