"""Layer 2: the only place that imports deepspeed."""
