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
    rules: tuple[tuple[bool, str, object, str, str], ...] = (
        *(
            (
                True,  # only settings that the run has are in `epoch_settings`
                key,
                epochs,
                "a stream of samples has no length, so an epoch cannot be counted in steps",
                f"{key.replace('epochs', 'steps')}=N {key}=null",
            )
            for key, epochs in config.epoch_settings.items()
        ),
        (
            config.data.workers > 1,
            "data.workers",
            config.data.workers,
            "a stream of samples is read in its own order, by one thread",
            "data.workers=1",
        ),
        (
            config.sites is not None,
            "sites",
            "set",
            "a site that joins later continues at another step, and a stream of samples can only "
            "continue at a state that it has returned",
            "train at one site (sites=null), or samples with __len__ and __getitem__",
        ),
    )
    return [Problem(key, value, rule, fix) for applies, key, value, rule, fix in rules if applies]
