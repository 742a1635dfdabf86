"""Known traps of DeepSpeed, and the tests that cover more than one of them."""

from __future__ import annotations

from dataclasses import dataclass

MATRIX = "tests/parity/test_matrix.py::test_equals_plain_training"
INITIAL = "tests/parity/test_matrix.py::assert_initial"
BLOCKS = "tests/unit/settings/deepspeed/test_engine_config.py::test_blocks_the_run_owns_are_refused"
OWNERS = "tests/unit/settings/deepspeed/test_engine_config.py::test_contradictions_name_both_owners"
REMOVED = (
    "tests/unit/settings/deepspeed/test_engine_config.py::test_removed_blocks_are_named_as_removed"
)
UNKNOWN = (
    "tests/unit/settings/deepspeed/test_engine_config.py::test_unknown_keys_and_values_are_refused"
)
PIPELINE = "tests/parity/test_pipeline.py::test_equals_plain_training"
RULES = (
    "tests/unit/settings/compatibility/test_compatibility.py"
    "::test_example_is_refused_by_its_rule_alone"
)
RESUME = "tests/parity/test_resume.py::test_goes_on"
SPLIT = "tests/parity/test_tensor_checkpoints.py::test_goes_on"
PLANS = "tests/parity/test_architectures.py::test_a_sample_of_families"


@dataclass(frozen=True)
class Trap:
    """Behaviour of DeepSpeed, and bigtrain's answer; `FILE::NAME` is its location.

    rules: of the compatibility table. refused: a key of the JSON that is refused whatever the run
    is. code: where it is made right. note: how, in words.
    """

    area: str
    text: str
    note: str
    tests: tuple[str, ...]
    rules: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
