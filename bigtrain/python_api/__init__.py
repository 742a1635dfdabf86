"""Public Python API of `import bigtrain`: tokenize, check, plan, train, read, export, generate.

Above everything except the commands, `cli` and `train.py`, which are thin wrappers of these
functions. `bigtrain/__init__.py` exports them by name and imports a module of this folder when one
of its names is first used; each function imports torch and the like itself, so that no import here
is slow. Start with `configuring` (`check`, `train_run`); `new_run`, `tokenizing`, `shards` and
`planning` come before it in a user's workflow, `results` and `scoring` after it.
"""
