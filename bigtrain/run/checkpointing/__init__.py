"""When checkpoints are saved, kept, resumed from, rolled back to, listed, exported.

`checkpoints` is the directory of them; `saver` writes, `resume` reads. Above the session.
"""
