"""What the page on sites says to type is typed here, and its figures are those of the code."""

from __future__ import annotations

import re
from collections.abc import Callable

import yaml

from bigtrain.settings.run_config import SitesSection
from bigtrain.sites.codecs import sent_bytes
from tests.support.pages import page_text

PAGE = page_text("docs/howto/sites.md")
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


def test_the_commands_as_they_stand(typed: Callable[[str], str]) -> None:
    assert LINES
    for line in LINES:
        assert "x 2 sites" in typed(line)


def test_bytes_of_the_table() -> None:
    rows = dict(re.findall(r"^\| (.*?) \| ([\d.]+) \|", PAGE, flags=re.M))
    weights = 2 * PARAMETERS / 1e9
    assert float(rows["ZeRO 3 over both sites"]) == 3 * weights
    assert float(rows["ZeRO++ over both sites (`zeropp`)"]) == 0.75 * weights
    assert float(rows["data parallelism between them, gradients in bfloat16"]) == weights
    for codec, steps in (("float32", 100), ("bfloat16", 100), ("bfloat16", 500), ("int8", 500),
                         ("int4", 500)):  # fmt: skip
        gigabytes = sent_bytes(PARAMETERS, 2, codec) / steps / 1e9
        assert float(rows[f"sites, {codec}, {steps} inner steps"]) == round(gigabytes, 4)
    assert f"takes {sent_bytes(PARAMETERS, 2, 'bfloat16') / 500 * 8 / 1e9:.2f} s of every" in TEXT
    assert f"ZeRO++ {0.75 * weights * 8:.0f} s" in TEXT
