"""Weights: safetensors to parameters and back, a rectangle at a time.

Start with `import_hf` (into parameters, each rank its own part) and `export_hf`. `lazy_tensors` are
tensors that are computed when they are written; `checksums` says which files a run began with.
"""
