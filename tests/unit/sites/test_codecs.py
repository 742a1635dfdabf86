"""Codes of blocks: their sizes, what rounding can lose, values that are not finite."""

from __future__ import annotations

import pytest
import torch

from bigtrain.sites.codecs import CODECS, BlockCodec
from bigtrain.sites.outer_state import fragment_of

BLOCKS = ["int8", "int4"]


@pytest.mark.parametrize("size", [1, 63, 257])
@pytest.mark.parametrize("name", BLOCKS)
def test_no_value_is_off_by_more_than_half_a_scale(name: str, size: int) -> None:
    codec = CODECS[name]
    assert isinstance(codec, BlockCodec)
    generator = torch.Generator().manual_seed(size)
    magnitudes = 10.0 ** torch.randint(-8, 3, (3, size), generator=generator)
    values = magnitudes * torch.randn(3, size, generator=generator)
    codes = codec.encode(values)
    assert codes.shape == (3, codec.num_bytes(size))
    decoded = codec.decode(codes, size)
    for row, back in zip(values, decoded, strict=True):
        for part, near in zip(row.split(codec.block), back.split(codec.block), strict=True):
            scale = part.abs().max() / codec.levels
            assert (part - near).abs().max() <= scale * 0.5001
            assert torch.equal(near.abs().max(), scale * codec.levels)


@pytest.mark.parametrize("name", BLOCKS)
def test_every_integer_comes_back(name: str) -> None:
    codec = CODECS[name]
    assert isinstance(codec, BlockCodec)
    values = torch.arange(-codec.levels, codec.levels + 1.0).repeat(1, 9)
    assert torch.equal(codec.decode(codec.encode(values), values.shape[1]), values)
    # And from float64, in which means are taken.
    assert torch.equal(codec.encode(values.double()), codec.encode(values))


@pytest.mark.parametrize("name", CODECS)
def test_zeros_stay_and_what_is_not_finite_is_not_hidden(name: str) -> None:
    codec = CODECS[name]
    assert torch.equal(codec.decode(codec.encode(torch.zeros(2, 300)), 300), torch.zeros(2, 300))
    for bad in (float("nan"), float("inf")):
        values = torch.ones(1, 300)
        values[0, 7] = bad
        assert not codec.decode(codec.encode(values), 300)[0, 7].isfinite()


def test_bits_of_an_element() -> None:
    bits = {name: 8 * codec.num_bytes(1 << 16) / (1 << 16) for name, codec in CODECS.items()}
    assert bits == {"float32": 32, "bfloat16": 16, "int8": 8.125, "int4": 4.5}


def test_layers_are_dealt_to_fragments_in_turn() -> None:
    names = ["model.embed_tokens.weight", *(f"model.layers.{n}.mlp.up.weight" for n in range(5))]
    assert [fragment_of(name, 2) for name in names] == [0, 0, 1, 0, 1, 0]
    assert fragment_of("model.layers.3.mlp.experts.7.up.weight", 4) == 3
    assert fragment_of("lm_head.weight", 3) == 0
