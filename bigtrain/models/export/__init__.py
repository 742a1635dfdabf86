"""Exports: a Hugging Face or peft directory, verified before it gets its name.

Imports `models.build`, `layers` and `weights`; `run.checkpointing` and the commands import it.
Start with `verified`.
"""
