"""The outer update against torch's SGD, and means over sites, to the last bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bigtrain.engine.sites.codecs import CODECS, sent_bytes
from bigtrain.engine.sites.exchange import Exchange
from bigtrain.engine.sites.outer_update import outer_update
from bigtrain.models.torch_patches import gloo_group
from bigtrain.settings.sections.sites import OuterSection, SitesSection


def section(count: int = 2, **outer: Any) -> SitesSection:
    address = "127.0.0.1:29600"
    return SitesSection(
        count=count, inner_steps=1, address=address, outer=OuterSection.model_validate(outer)
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


def exchanged(codec: str, local: torch.Tensor, weights: torch.Tensor) -> list[tuple[Any, int]]:
    """What `Exchange.mean` gives each site of `local` [sites, N], and the bytes it counts."""
    count = len(local)
    store = dist.HashStore()

    def of_site(index: int) -> tuple[torch.Tensor, int]:
        group = gloo_group(store, index, count, timedelta(seconds=30), "127.0.0.1")
        exchange = Exchange(group, count, codec)
        found = exchange.mean(local[index].clone(), weights)
        group.barrier().wait()
        return found, exchange.num_bytes

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(of_site, range(count)))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_all_sites_get_the_same_mean(codec: str, count: int) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(100, generator=generator)
    local = weights + 0.01 * torch.randn(count, 100, generator=generator)
    if codec == "float32":
        mean = local.double().mean(0).float()
    else:
        changes = (local - weights).bfloat16().double()
        mean = weights + changes.mean(0).bfloat16().float()
    for found, num_bytes in exchanged(codec, local, weights):
        assert torch.equal(found, mean)
        assert num_bytes == sent_bytes(100, count, codec)


def test_bytes_of_the_formula() -> None:
    assert sent_bytes(1000, 1, "float32") == 0
    assert sent_bytes(1000, 2, "float32") == 4000
    assert sent_bytes(1001, 2, "bfloat16") == 2 * 501 * 2
    assert sent_bytes(900, 3, "float32") == 2 * 2 * 300 * 4


def test_three_sites_with_the_same_weights_keep_them() -> None:
    local = torch.randn(50, generator=torch.Generator().manual_seed(4))
    for found, _ in exchanged("float32", local.expand(3, -1), torch.zeros(50)):
        assert torch.equal(found, local)


def test_a_site_that_sends_nothing_is_not_waited_for_longer() -> None:
    store = dist.HashStore()

    def of_site(index: int) -> Any:
        group = gloo_group(store, index, 2, timedelta(seconds=0.5), "127.0.0.1")
        if index == 0:
            with pytest.raises(RuntimeError, match="Timed out"):
                Exchange(group, 2, "float32").mean(torch.zeros(4), torch.zeros(4))
        return group

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(of_site, range(2)))
