"""One training run: session, loop, beginning and end.

Imports everything below; `train.py` and the commands import it. Start with `loop`; `session` is
what one start of a run has open, `preflight` what it looks at first.
"""
