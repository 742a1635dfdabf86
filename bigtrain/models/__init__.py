"""Hugging Face models: loaded, built, cut over ranks, tried, exported.

Besides `data.tokenizers`, transformers is imported only here. Imports `settings`, `planner` and
`system`; no data, no deepspeed. `engine`, `run`, `parity` and the commands import it. Start with
`build`; `layers` changes single layers, `parallel` cuts a model over ranks, `experts` reads
routers, `weights` reads and writes files, `equivalence` tries on proxy models that each of these
computes the same, `export` writes what others load. Only `transformers_patches` and `torch_patches`
touch private parts of those libraries.
"""
