"""Codes and changes that no outer step may use, whoever made them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from bigtrain.models.torch_patches import gloo_group
from bigtrain.sites.codecs import CODECS, BlockCodec
from bigtrain.sites.contribution import (
    UnusableError,
    UnusableSiteError,
    decoded,
    refuse_norm,
)
from bigtrain.sites.exchange import SiteGroup

BAD = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("name", CODECS)
def test_codes_of_finite_values_pass_and_one_value_that_is_not_finite_does_not(name: str) -> None:
    codec = CODECS[name]
    for count in (0, 1, 300):
        values = torch.randn(2, count, generator=torch.Generator().manual_seed(count))
        codes = codec.encode(values)
        if count:
            assert torch.equal(decoded(codec, codes, count), codec.decode(codes, count))
    for bad in BAD:
        for position in (0, 7, 299):
            values = torch.zeros(1, 300)
            values[0, position] = bad
            with pytest.raises(UnusableError, match="not finite"):
                decoded(codec, codec.encode(values), 300)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_scales_and_integers_that_no_site_makes(name: str) -> None:
    codec = CODECS[name]
    assert isinstance(codec, BlockCodec)
    codes = codec.encode(torch.ones(1, 300))
    for scale in (*BAD, -1.0, 3e38):
        damaged = codes.clone()
        damaged[:, 4:8] = torch.tensor([scale]).view(torch.uint8)
        with pytest.raises(UnusableError):
            decoded(codec, damaged, 300)
    begin = 4 * codec.num_blocks(300)
    damaged = codes.clone()
    damaged[0, begin] = 0x80 if name == "int8" else 0x78  # -128; -8 in the low half
    with pytest.raises(UnusableError, match="out of range"):
        decoded(codec, damaged, 300)


def test_a_change_is_bounded_beside_the_weights() -> None:
    refuse_norm(change=100 * 9.9**2, weights=0.0, count=100)
    refuse_norm(change=100 * 19.9**2, weights=100.0, count=100)
    for change, weights in ((100 * 10.1**2, 0.0), (100 * 20.1**2, 100.0)):
        with pytest.raises(UnusableError, match="root mean square"):
            refuse_norm(change, weights, 100)
    for bad in BAD[:2]:
        with pytest.raises(UnusableError, match="NaN or an infinity"):
            refuse_norm(bad, 1.0, 100)


@pytest.mark.parametrize(
    ("codec", "bad"),
    [("float32", float("nan")), ("bfloat16", 1e30), ("int8", 1e30), ("int4", float("nan"))],
)
def test_sites_name_the_one_whose_values_they_cannot_use(codec: str, bad: float) -> None:
    """Site 1 of 3 sends one bad value, in the part of which site 2 takes the mean."""
    store, weights = dist.HashStore(), torch.randn(90, generator=torch.Generator().manual_seed(1))

    def of_site(index: int) -> int | None:
        group = gloo_group(store, index, 3, timedelta(seconds=20), "127.0.0.1")
        local = weights.clone()
        if index == 1:
            local[80] = bad
        error = torch.zeros_like(weights) if CODECS[codec].keeps_error else None
        exchange = SiteGroup(group, [1, 1, 1])
        try:
            exchange.mean(CODECS[codec], local, weights, error)
        except UnusableSiteError as failure:
            return failure.position
        except RuntimeError:
            return None  # its connection was closed by the one that saw it
        finally:
            exchange._group = None
        return -1

    with ThreadPoolExecutor(3) as threads:
        positions = list(threads.map(of_site, range(3)))
    assert positions == [None, None, 1]
