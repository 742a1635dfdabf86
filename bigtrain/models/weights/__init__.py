"""Weights: safetensors to parameters and back, a rectangle at a time.

Imports the patch modules, `layers.parameters` and `layers.adapters`; `build`, `export`, the engine
and `run.checkpointing` import it. Start with `import_hf` (into parameters, each rank its own part)
and `export_hf`. `lazy_tensors` are tensors read or computed on demand; `checksums` lists the files
that a run began with.
"""
