"""Exports: a Hugging Face or peft directory, verified before it gets its name. Imports
`models.build`, `layers` and `weights`. Start with `verified`."""
