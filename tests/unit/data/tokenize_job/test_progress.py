"""What people see of a tokenization, on a terminal and elsewhere."""

from __future__ import annotations

import io

from bigtrain.data.tokenize_job.progress import LINE_EVERY_S, TokenizeProgress, announce
from bigtrain.data.tokenize_job.unit_builder import Counts


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def counts(megabytes: int, tokens: int, path: str = "in/a.jsonl", bad: int = 0) -> Counts:
    return Counts(megabytes * 10**6, tokens, bad, path, megabytes * 10**6, 40 * 10**6)


def test_an_occasional_line() -> None:
    stream, clock = io.StringIO(), Clock()
    with TokenizeProgress(100 * 10**6, 20 * 10**6, 2, stream, clock) as progress:
        progress.update(0, counts(1, 1))
        clock.now_s += LINE_EVERY_S / 2
        progress.update(0, counts(10, 10**6))
        assert stream.getvalue() == ""
        clock.now_s += LINE_EVERY_S / 2
        progress.update(1, counts(20, 2 * 10**6, "in/b.jsonl", bad=3))
        progress.update(1, counts(21, 2 * 10**6, "in/b.jsonl", bad=3))
    assert stream.getvalue() == (
        "tokenize: 50 MB of 100 (50 %), 3.0M tokens, 0.5 MB/s, 50,000 tokens/s, 01:40 left, "
        "3 bad documents; reading a.jsonl 25 %, b.jsonl 50 %\n"
    )


def test_rounds_add_up() -> None:
    progress = TokenizeProgress(0, 0, 1, io.StringIO(), Clock())
    progress.update(0, counts(10, 100))
    progress.end_round()
    progress.update(0, counts(5, 50))
    assert (progress.counts().num_bytes, progress.counts().num_tokens) == (15 * 10**6, 150)
    assert progress.line().startswith("tokenize: 15 MB, 0.0M tokens")


def test_waiting_is_said_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = TokenizeProgress(0, 0, 1, stream, clock)
    progress.wait_for_others(3)
    assert stream.getvalue() == ""
    clock.now_s += LINE_EVERY_S
    progress.wait_for_others(3)
    assert stream.getvalue() == "tokenize: waiting for 3 parts of other processes\n"


def test_bars_on_a_terminal() -> None:
    """One in total, and one for the input that each worker reads."""
    stream, clock = Terminal(), Clock()
    with TokenizeProgress(100 * 10**6, 20 * 10**6, 2, stream, clock) as progress:
        clock.now_s += 10
        progress.update(0, counts(10, 10**7))
        progress.update(1, counts(20, 10**7, "in/b.jsonl", bad=2))
        for bar in progress._bars:
            bar.refresh()
    shown = stream.getvalue()
    for part in ("tokenize:  50%", "50.0M/100M", "2.00M tokens/s, 2 bad", "a.jsonl:  25%"):
        assert part in shown
    assert "b.jsonl:  50%" in shown


def test_steps_before_the_first_document_are_shown_on_a_terminal() -> None:
    """Imports and comparisons take seconds; a log file gets none of these lines."""
    for stream in (Terminal(), io.StringIO()):
        announce("loading tokenizer x", stream)
        with TokenizeProgress(100 * 10**6, 0, 1, stream, Clock()) as progress:
            progress.show_step("starting 2 workers")
        shown = stream.getvalue()
        assert shown.startswith("tokenize: loading tokenizer x\n") == stream.isatty()
        assert ("starting 2 workers" in shown) == stream.isatty()
