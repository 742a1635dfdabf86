"""Saving, retention, resume, rollback, listing and export of checkpoints.

Tensors are written by `engine.checkpoint`. Imports `engine`, `models` and the session; the
loop, `training` and the commands import it. Start with `checkpoints`, their directory;
`saver` writes it, `resume` reads it.
"""
