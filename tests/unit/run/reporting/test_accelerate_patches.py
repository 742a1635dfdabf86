"""The part of accelerate's trackers that bigtrain replaces is there."""

from __future__ import annotations

import pytest
from accelerate import tracking

from bigtrain.run.reporting import accelerate_patches as patches
from tests.support.contracts import Contract, public_functions, reads, title


def replaces() -> bool:
    before = tracking.logger
    with patches.standard_logging():
        # As the trackers call it; accelerate's own asks for a PartialState.
        tracking.logger.debug("nothing", main_process_only=False)
        inside = tracking.logger
    return inside is not before and tracking.logger is before


CONTRACTS = [
    reads(patches.standard_logging, lambda: tracking, "logger = get_logger(__name__)"),
    Contract(
        patches.standard_logging,
        "accelerate's trackers log otherwise than by tracking.logger",
        replaces,
    ),
]


@pytest.mark.parametrize("contract", CONTRACTS, ids=title)
def test_accelerate_is_as_it_was_read(contract: Contract) -> None:
    contract.check("accelerate")


def test_every_patch_has_a_contract() -> None:
    wanted = public_functions(patches)
    assert wanted - {contract.name for contract in CONTRACTS} == set()
