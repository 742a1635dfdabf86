"""Rules about sites: only combinations that have been compared with a plain loop may run."""

from __future__ import annotations

from dataclasses import replace

from bigtrain.settings.compatibility.facts import Facts, Rule, rule, rules_of, unproven_engines

_UNPROVEN = "the outer step of sites has not been compared with a plain loop"


_refused = rules_of(lambda f: f.num_sites > 0, {"num_sites": 2})

SITE_RULES: tuple[Rule, ...] = (
    _refused(
        "sites with adapters",
        lambda f: f.adapters is not None,
        ("sites.count", lambda f: f.num_sites),
        f"{_UNPROVEN} where adapters alone are trained",
        "leave out sites: adapters are small enough to be averaged at every step",
        {"num_sites": 0},
        Facts(adapters="lora"),
    ),
    _refused(
        "sites with expert parallelism",
        lambda f: f.expert_size > 1,
        ("parallel.expert", lambda f: f.expert_size),
        f"{_UNPROVEN} where ranks divide the experts",
        "parallel.expert=1",
        {"expert_size": 1},
        Facts(zero_stage=1, world_size=2, expert_size=2),
    ),
    _refused(
        "sites with biases of experts",
        lambda f: f.bias_updates,
        ("moe.bias_update_rate", lambda f: "set"),
        "the biases of experts are no weights: each site would move its own, and they would differ",
        "moe.bias_update_rate=0",
        {"bias_updates": False},
        Facts(bias_updates=True),
    ),
    _refused(
        "sites that stop early",
        lambda f: f.stops_early,
        ("evaluation.early_stopping", lambda f: "set"),
        "each site measures by itself, and the others would wait for one that has stopped",
        "evaluation.early_stopping=null",
        {"stops_early": False},
        Facts(stops_early=True),
    ),
    *unproven_engines(_refused, "sites", _UNPROVEN),
    _refused(
        "sites under accelerate's own settings",
        lambda f: f.accelerate,
        ("sites.count", lambda f: f.num_sites),
        "a run of sites has not been tried with an engine that accelerate's answers configure",
        "name a DeepSpeed JSON (engine.deepspeed_config), or start it by another launcher",
        {"accelerate": False},
        Facts(accelerate=True),
    ),
    rule(
        "fragments without a layer",
        lambda f: f.num_layers is not None and f.site_fragments > f.num_layers > 0,
        ("sites.fragments", lambda f: f.site_fragments),
        lambda f: (
            f"layers are dealt to fragments in turn, and the model has {f.num_layers}, so that "
            "some would be empty"
        ),
        lambda f: f"sites.fragments={f.num_layers} or less that divides sites.inner_steps",
        lambda f: replace(f, site_fragments=f.num_layers or 1),
        Facts(num_sites=2, site_fragments=8, num_layers=4),
    ),
)
