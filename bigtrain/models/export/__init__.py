"""Exports: a Hugging Face or peft directory, verified before it gets its name. Start with
`verified`."""
