"""The section sites: defaults, what it refuses, and the samples that each site reads."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from bigtrain.errors import ConfigError
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import BatchSection, RunConfig, SitesSection
from tests.support.run_trees import run_config

MEET = {"server": "http://10.0.0.1:29700", "token_file": "token"}


def section(**values: Any) -> SitesSection:
    meet = MEET | {"exchange": "direct"}
    return SitesSection.model_validate({"count": 2, "inner_steps": 100} | meet | values)


@pytest.mark.parametrize(
    ("count", "outer", "expected"),
    [
        (1, {}, 0.6),
        (4, {}, 0.6),
        (8, {}, 0.8),
        (2, {"type": "average"}, 1.0),
        (8, {"type": "momentum"}, 0.8),
        (8, {"lr": 0.3}, 0.3),
    ],
)
def test_rates_by_the_number_of_sites(count: int, outer: dict[str, Any], expected: float) -> None:
    sites = section(count=count, outer=outer)
    assert sites.outer_lr == expected
    assert sites.outer.decay == 0.9


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"index": 2}, "index = 2 is none of sites.count = 2 sites, counted from 0 -> 0 to 1"),
        ({"server": None}, "sites.server is missing, and sites.count = 2 sites have to meet"),
        ({"server": "10.0.0.1:29700"}, "sites.server = '10.0.0.1:29700' is not http://host:port"),
        ({"server": "http://host"}, "sites.server = 'http://host' is not http://host:port"),
        ({"server": "http://host:70000"}, "sites.server = 'http://host:70000' is not http://"),
        ({"token_file": None}, "sites.token_file is missing, and the server at http://10.0.0.1"),
        ({"address": "10.0.0.1:29600"}, "sites.address = '10.0.0.1:29600' no longer exists: sites"),
        (
            {"exchange": "server", "inner_steps": 10, "fragments": 2, "overlap_steps": 1},
            "sites.fragments = 2, overlap_steps = 1, mixing = 0 with sites.exchange = 'server'",
        ),
        ({"exchange": "gossip"}, "'server' or 'direct'"),
        (
            {"server": "https://10.0.0.1:29700", "start_server": True},
            "sites.server = 'https://10.0.0.1:29700' is https, and sites.start_server = true",
        ),
        (
            {"count": 1, "server": None, "start_server": True},
            "sites.start_server = true needs the address at which sites meet",
        ),
        ({"inner_steps": 0}, "greater than or equal to 1"),
        ({"outer": {"type": "average", "momentum": 0.5}}, "sites.outer.type = average has none"),
        ({"codec": "int3"}, "'float32', 'bfloat16', 'int8' or 'int4'"),
        (
            {"inner_steps": 10, "fragments": 4},
            "sites.fragments = 4 does not divide sites.inner_steps = 10 -> fragments: 5, or "
            "inner_steps: 8 or 12",
        ),
        (
            {"inner_steps": 10, "fragments": 2, "overlap_steps": 5},
            "sites.overlap_steps = 5 is not less than sites.inner_steps / sites.fragments = 5",
        ),
        ({"mixing": 1.0}, "less than 1"),
        ({"shares": [1]}, r"sites.shares = \[1\] has 1 numbers for"),
    ],
)
def test_refusals(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        section(**values)


def test_addresses_are_taken_apart() -> None:
    """A server holds the weights unless sites exchange them."""
    assert section().server_place == ("10.0.0.1", 29700)
    assert section(server="http://[fd00::1]:29600").server_place == ("fd00::1", 29600)
    assert section(exchange="server").server_holds_weights
    assert not section().server_holds_weights
    assert not SitesSection(count=1, inner_steps=1).server_holds_weights


def test_fragments_are_sent_in_turn_and_all_after_the_last_step() -> None:
    sites = section(inner_steps=6, fragments=3, overlap_steps=1)
    sent = {step: parts for step in range(1, 14) if (parts := [*sites.sent_after(step, 13)])}
    assert sent == {2: [0], 4: [1], 6: [2], 8: [0], 10: [1], 12: [2], 13: [0, 1, 2]}
    assert sites.merged_after(4) == 5
    whole = section(inner_steps=4)
    assert [step for step in range(1, 11) if whole.sent_after(step, 10)] == [4, 8, 10]


def run(**sections: Any) -> RunConfig:
    batch = {"sequence_length": 16, "global_batch_size": 8, "micro_batch_size": 2}
    sites = {"count": 2, "inner_steps": 5} | MEET
    return run_config(batch=batch, train={"steps": 10}, sites=sites, **sections)


def test_the_global_batch_is_of_all_sites() -> None:
    resolved = resolve_run(run(), 2, "zero1")
    plan = resolved.plan
    assert (plan.global_batch_size, plan.site_batch_size, plan.accumulation) == (8, 4, 1)
    assert plan.tokens_per_step == 2 * plan.site_tokens_per_step == 8 * 16
    assert resolved.engine.deepspeed["gradient_accumulation_steps"] == 1
    assert "x 2 sites; 128 tokens" in plan.equation()


def test_what_is_not_proven_is_refused_with_a_reason() -> None:
    with pytest.raises(ConfigError, match="sites has not been compared with a plain loop"):
        resolve_run(run(precision={"dtype": "float16"}), 1, "zero1")


def test_the_watchdog_waits_longer() -> None:
    with pytest.raises(ValidationError, match=r"is not less than watchdog\.slow_timeout_seconds"):
        run(watchdog={"slow_timeout_seconds": 600})
    run(watchdog={"slow_timeout_seconds": 600, "timeout_seconds": None})


@pytest.mark.parametrize("shares", [(), (2, 1, 1)])
def test_each_sample_of_a_step_is_read_by_one_rank_of_one_site(shares: tuple[int, ...]) -> None:
    """Whatever number of ranks, and size of micro-batches, a site has."""
    batch = 48
    seen: list[int] = []
    readers: list[int] = []
    for site, (data_size, micro) in enumerate([(2, 2), (1, 4), (4, 1)]):
        section = BatchSection(sequence_length=16, global_batch_size=batch, micro_batch_size=micro)
        plan, problems = plan_batch(section, data_size, 3, site, shares)
        assert plan is not None, problems
        expected = batch // 4 * shares[site] if shares else batch // 3
        assert plan.site_batch_size == expected
        assert plan.site_tokens_per_step == expected * 16
        own = range(batch)[plan.site_begin : plan.site_begin + plan.site_batch_size]
        assert plan.accumulation * data_size * micro == len(own)
        seen += own
        readers += [plan.reader(rank) for rank in range(data_size)]
    assert seen == list(range(batch))
    # Seeds are of these: other ones on each rank, and as without sites on the first of them.
    assert len(set(readers)) == len(readers)
    assert readers[:2] == [0, 1]


def test_shares_that_do_not_divide_are_refused_with_those_that_do() -> None:
    section_of_batch = BatchSection(sequence_length=16, global_batch_size=16, micro_batch_size=2)
    plan, (problem,) = plan_batch(section_of_batch, 1, 2, 0, (2, 1))
    assert plan is None
    assert str(problem) == (
        "batch.global_batch_size = 16: is divided among sites in shares of 2 : 1, each a multiple "
        "of batch.micro_batch_size x data-parallel size = 2 x 1, which gives multiples of 6 -> "
        "nearest: 12 or 18"
    )
    plan, (problem,) = plan_batch(section_of_batch, 2, 3)
    assert plan is None
    assert "x data-parallel size x sites = 2 x 2 x 3 = 12 -> nearest: 12 or 24" in str(problem)
