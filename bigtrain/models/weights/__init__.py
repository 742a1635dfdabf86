"""Weights: safetensors to parameters and back, a rectangle at a time. Start with `import_hf` (ranks
read their part of the parameters), which reads `weight_files`, and `export_hf`."""
