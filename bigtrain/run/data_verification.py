"""Verification of all data before a run, if configured (``data.verify: contents``)."""

from __future__ import annotations

import time

from bigtrain.data.shards.verification import ListedShards, share_of
from bigtrain.errors import DataError
from bigtrain.run.session import Session

_NAMED = 10


def verify_data(session: Session) -> None:
    """Compare the run's dataset files with their checksums; each rank reads a part. Collective.

    Raises DataError on every rank, listing all corrupt files.
    """
    begun = time.perf_counter()
    shards = ListedShards(session.run.config.data)
    share = share_of(shards.num_bytes.tolist(), session.world.rank, session.world.size)
    texts_by_rank = session.long_work.on_every_rank(
        lambda: [text for number in share for text in shards[number].problems()]
    )
    corrupt = sorted(text for texts in texts_by_rank for text in texts)
    if corrupt:
        shown = corrupt[:_NAMED]
        if len(corrupt) > _NAMED:
            shown.append(f"and {len(corrupt) - _NAMED} more")
        raise DataError(
            f"{len(corrupt)} of {shards.num_files} files of the data are corrupt -> restore them, "
            "or remove the dataset and tokenize again:\n" + "\n".join(f"  {text}" for text in shown)
        )
    gigabytes = shards.num_bytes.sum() / 1e9
    session.say(
        f"data verified: {shards.num_files} files, {gigabytes:.3g} GB of tokens in "
        f"{time.perf_counter() - begun:.1f} s"
    )
