"""What the page on sites says to type is typed here, and its figures are those of the code."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import yaml

from bigtrain.settings.compatibility.training import SITES
from bigtrain.settings.run_config import SitesSection
from bigtrain.sites.codecs import sent_bytes
from tests.support.worlds import ROOT

PAGE = (ROOT / "docs/howto/sites.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
LINES = [line for line in PAGE.splitlines() if line.startswith("bigtrain check ")]
PARAMETERS = 1_000_000_000


def test_the_section_is_read_and_its_defaults_are_those_of_the_page() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.M | re.S)
    sites = SitesSection(**yaml.safe_load(block)["sites"])
    assert sites.outer.type == "nesterov"
    assert f"momentum {sites.outer.decay} and a rate of {sites.outer_lr} for up to 4" in TEXT
    meet = {"server": "http://a:1", "token_file": "token"}
    rates = [
        SitesSection.model_validate({"count": n, "inner_steps": 1} | meet).outer_lr for n in (4, 5)
    ]
    assert f"{rates[0]} for up to 4 sites and {rates[1]} beyond" in TEXT


@pytest.mark.parametrize("line", LINES)
def test_the_commands_as_they_stand(line: str, typed: Callable[[str], str]) -> None:
    assert "x 2 sites" in typed(line)


def test_bytes_of_the_table() -> None:
    rows = dict(re.findall(r"^\| (.*?) \| ([\d.]+) \|", PAGE, flags=re.M))
    weights = 2 * PARAMETERS / 1e9
    assert float(rows["ZeRO 3 over both sites"]) == 3 * weights
    assert float(rows["ZeRO++ over both sites (`zeropp`)"]) == 0.75 * weights
    assert float(rows["data parallelism between them, gradients in bfloat16"]) == weights
    for codec, steps in (("float32", 100), ("bfloat16", 100), ("bfloat16", 500), ("int8", 500)):
        gigabytes = sent_bytes(PARAMETERS, 2, codec) / steps / 1e9
        assert float(rows[f"sites, {codec}, {steps} inner steps"]) == round(gigabytes, 4)
    gigabytes = sent_bytes(PARAMETERS, 2, "int4") / 500 / 1e9
    assert float(rows["sites, int4, 500 inner steps"]) == round(gigabytes, 4)
    assert f"takes {sent_bytes(PARAMETERS, 2, 'bfloat16') / 500 * 8 / 1e9:.2f} s of every" in TEXT
    assert f"ZeRO++ {0.75 * weights * 8:.0f} s" in TEXT


def test_all_that_is_refused_is_named() -> None:
    words = {
        "sites with adapters": "Adapters",
        "sites with expert parallelism": "expert parallelism",
        "sites with biases of experts": "biases of experts",
        "sites in float16": "float16",
        "sites with parameters on NVMe": "NVMe",
        "sites with SuperOffload": "SuperOffload",
        "sites over quantized or secondary partitions": "ZeRO++",
        "sites with checkpoints in memory": "checkpoints in memory",
        "sites with compared replicas": "compared replicas",
        "sites that stop early": "early stopping",
        "fragments without a layer": "more fragments than layers",
        "sites under accelerate's own settings": "accelerate without",
    }
    assert words.keys() == SITES.keys()
    refused = TEXT.partition("## What is refused")[2]
    assert all(word in refused for word in words.values())
