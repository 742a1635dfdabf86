"""The outer update against torch's SGD, and means over sites, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bigtrain.models.torch_patches import gloo_group
from bigtrain.settings.sections.sites import OuterSection, SitesSection
from bigtrain.sites.codecs import CODECS, sent_bytes
from bigtrain.sites.exchange import SiteGroup
from bigtrain.sites.outer_optimizer import outer_update


def section(count: int = 2, **outer: Any) -> SitesSection:
    return SitesSection(
        count=count,
        inner_steps=1,
        server="http://127.0.0.1:29700",
        token_file="token",
        outer=OuterSection.model_validate(outer),
    )


@pytest.mark.parametrize("kind", ["nesterov", "momentum", "average"])
def test_outer_updates_are_those_of_torch(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(1001, generator=generator)
    sites = section(type=kind, lr=0.7, **({} if kind == "average" else {"momentum": 0.8}))
    expected = start.clone().requires_grad_()
    momentum = 0.0 if kind == "average" else 0.8
    sgd = torch.optim.SGD([expected], lr=0.7, momentum=momentum, nesterov=kind == "nesterov")
    weights, state = start.clone(), torch.zeros_like(start) if momentum else None
    for _ in range(10):
        mean = weights + 0.1 * torch.randn(1001, generator=generator)
        expected.grad = weights - mean
        sgd.step()
        outer_update(weights, state, mean.clone(), sites)
        if kind == "average":  # by another way round, which is exact for a rate of 1
            torch.testing.assert_close(weights, expected.detach(), rtol=0, atol=3e-7)
            expected.data.copy_(weights)
        assert torch.equal(weights, expected.detach())


def test_an_average_at_rate_1_is_the_mean_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(1000, generator=generator)
    mean = torch.randn(1000, generator=generator) * 1e-6
    assert not torch.equal(weights - (weights - mean), mean)  # as a gradient step would have it
    outer_update(weights, None, mean.clone(), section(type="average"))
    assert torch.equal(weights, mean)


def exchanged(
    codec: str, local: torch.Tensor, weights: torch.Tensor, shares: Sequence[int] = ()
) -> list[tuple[list[torch.Tensor], Any, int]]:
    """What `SiteGroup.mean` gives each site of `local` [rounds, sites, N], one round after another;
    its error at the end, and the bytes it counts."""
    count = local.shape[1]
    store = dist.HashStore()

    def of_site(index: int) -> tuple[list[torch.Tensor], Any, int]:
        group = gloo_group(store, index, count, timedelta(seconds=30), "127.0.0.1")
        exchange = SiteGroup(group, shares or [1] * count)
        kind = CODECS[codec]
        error = torch.zeros_like(weights) if kind.keeps_error else None
        means = [exchange.mean(kind, own[index].clone(), weights, error) for own in local]
        group.barrier().wait()
        return means, error, exchange.num_bytes

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(of_site, range(count)))


@pytest.mark.parametrize(("codec", "count"), [("float32", 3), ("bfloat16", 2)])
def test_all_sites_get_the_same_mean(codec: str, count: int) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(100, generator=generator)
    local = weights + 0.01 * torch.randn(count, 100, generator=generator)
    if codec == "float32":
        mean = local.double().mean(0).float()
    else:
        changes = (local - weights).bfloat16().double()
        mean = weights + changes.mean(0).bfloat16().float()
    for (site_mean,), _, num_bytes in exchanged(codec, local.unsqueeze(0), weights):
        assert torch.equal(site_mean, mean)
        assert num_bytes == sent_bytes(100, count, codec)


def rounded(codec: str, values: torch.Tensor) -> torch.Tensor:
    """`values` [N] as they come out of blocks, by plain arithmetic."""
    levels, block = (127, 256) if codec == "int8" else (7, 64)
    parts = []
    for part in values.float().split(block):
        scale = part.abs().max() / levels
        parts.append(torch.round(part / scale) * scale if scale else part)
    return torch.cat(parts)


@pytest.mark.parametrize(("codec", "count"), [("int8", 3), ("int4", 2)])
def test_integers_of_all_sites_are_summed_and_what_is_lost_is_sent_later(
    codec: str, count: int
) -> None:
    """Against the same in plain arithmetic, round by round; 1001 elements divide by nothing."""
    rounds, size = 4, 1001
    generator = torch.Generator().manual_seed(5)
    changes = 1e-3 * torch.randn(rounds, count, size, generator=generator)
    weights = torch.randn(size, generator=generator)
    results = exchanged(codec, weights + changes, weights)
    part = -(-size // count)
    owns = [slice(i * part, min(size, (i + 1) * part)) for i in range(count)]
    errors = torch.zeros(count, size)
    for number in range(rounds):
        values = (weights + changes[number]) - weights + errors
        sent = torch.zeros(count, size)
        for own in owns:
            for site in range(count):
                sent[site, own] = rounded(codec, values[site, own])
        errors = values - sent
        mean = sent.double().mean(0)
        result = torch.zeros(size)
        for site, own in enumerate(owns):
            result[own] = rounded(codec, mean[own])
            errors[site, own] += count * (mean[own] - result[own])
        for of_site, (means, error, num_bytes) in enumerate(results):
            assert torch.equal(means[number], result + weights)
            if number == rounds - 1:
                torch.testing.assert_close(error, errors[of_site], rtol=0, atol=1e-9)
                assert num_bytes == rounds * sent_bytes(size, count, codec)
    # All that was lost is still there: what was sent differs from the truth by what is kept.
    total = torch.stack([results[0][0][n] - weights for n in range(rounds)]).double().sum(0)
    truth = changes.double().mean(1).sum(0)
    kept = torch.stack([error for _, error, _ in results]).double().mean(0)
    torch.testing.assert_close(total + kept, truth, rtol=0, atol=1e-6)


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_sites_count_by_their_shares(codec: str) -> None:
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(999, generator=generator)
    local = weights + 1e-3 * torch.randn(3, 2, 999, generator=generator)
    results = exchanged(codec, local, weights, (3, 1))
    truth = ((3 * (local[:, 0] - weights) + local[:, 1] - weights).double() / 4).sum(0)
    total = sum((mean - weights).double() for mean in results[0][0])
    if codec == "int8":
        total = total + (3 * results[0][1] + results[1][1]).double() / 4
    torch.testing.assert_close(total, truth, rtol=0, atol=1e-6)


def test_bytes_of_the_formula() -> None:
    assert sent_bytes(1024, 2, "int8") == 2 * (512 + 2 * 4)
    assert sent_bytes(1024, 2, "int4") == 2 * (256 + 8 * 4)
    assert sent_bytes(1001, 2, "int4") == 2 * (252 + 8 * 4)  # 501 halves of bytes, filled up to 4
    assert sent_bytes(1000, 1, "float32") == 0
    assert sent_bytes(1000, 2, "float32") == 4000
    assert sent_bytes(1001, 2, "bfloat16") == 2 * 501 * 2
    assert sent_bytes(900, 3, "float32") == 2 * 2 * 300 * 4


def test_a_site_that_sends_nothing_is_not_waited_for_longer() -> None:
    store = dist.HashStore()

    def of_site(index: int) -> Any:
        group = gloo_group(store, index, 2, timedelta(seconds=0.5), "127.0.0.1")
        if index == 0:
            with pytest.raises(RuntimeError, match="Timed out"):
                SiteGroup(group, [1, 1]).mean(CODECS["float32"], torch.zeros(4), torch.zeros(4))
        return group

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(of_site, range(2)))
