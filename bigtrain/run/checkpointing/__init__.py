"""Saving, retention, resume, rollback, listing and export of checkpoints. Start with `checkpoints`,
their directory; `saver` writes it, `resume` reads it, `engine.checkpoint` writes the tensors."""
