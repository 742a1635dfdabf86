"""Hugging Face models: configured, built, sharded, tested on proxy models, exported. Imports
`settings`, `planner` and `system`. Start with `build`. Only `transformers_patches` and
`torch_patches` use private parts of transformers and torch."""

from bigtrain.system.processes import hide_torchao_from_transformers

hide_torchao_from_transformers()
