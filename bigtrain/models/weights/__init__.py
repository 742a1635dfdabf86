"""Weights: safetensors to parameters and back, a rectangle at a time. Start with `import_hf` (into
parameters, each rank its own part), which reads `weight_files`, and `export_hf`."""
