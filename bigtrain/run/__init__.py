"""One training run: session, loop, beginning and end.

Imports everything below; `train.py` and the commands import it. Start with `training`, one start
from beginning to end, and `loop`; `session` is what a start has open, `preflight` what it looks at
first.
"""
