"""Hugging Face models: found, built, cut, proven, exported.

Beside `data.tokenizers`, transformers is imported only here. Imports `settings` and `system`; no
data, no deepspeed. Start with `build`; `layers` is what is done inside a model, `parallel` how it
is cut over ranks, `weights` how it is read and written, `equivalence` the trials that show that
each of these computes the same. Private parts of transformers and torch are touched in
`transformers_patches` and `torch_patches` alone.
"""
