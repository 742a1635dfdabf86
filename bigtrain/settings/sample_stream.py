"""Rules for settings of a run whose samples are a stream of the user. Pure."""

from __future__ import annotations

from bigtrain.errors import Problem
from bigtrain.settings.extensions import is_stream
from bigtrain.settings.run_config import RunConfig


def check_stream(config: RunConfig, samples: object) -> list[Problem]:
    """Return the problems of settings that a stream cannot have; none if `samples`, the class (or
    object) of ``data.samples``, is not a stream."""
    if not is_stream(samples):
        return []
    rule = "a stream of samples has no length, so an epoch cannot be counted in steps"
    problems = [
        Problem(key, epochs, rule, f"{key.replace('epochs', 'steps')}=N {key}=null")
        for key, epochs in config.epoch_settings.items()
    ]
    if config.data.workers > 1:
        rule = "a stream of samples is read in its own order, by one thread"
        problems.append(Problem("data.workers", config.data.workers, rule, "data.workers=1"))
    if config.sites is not None:
        rule = (
            "a site that joins later continues at another step, and a stream of samples can only "
            "continue at a state that it has returned"
        )
        fix = "train at one site (sites=null), or samples with __len__ and __getitem__"
        problems.append(Problem("sites", "set", rule, fix))
    return problems
