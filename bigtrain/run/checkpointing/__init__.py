"""When checkpoints are saved, kept, resumed from, rolled back to, listed and exported.

How tensors are written is `engine.checkpoint`. Imports `engine`, `models` and the session; the
loop, `training` and the commands import it. Start with `checkpoints`, the directory of them;
`saver` writes it, `resume` reads it.
"""
