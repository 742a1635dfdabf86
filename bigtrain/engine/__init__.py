"""DeepSpeed engine of a model, and its optimizer step. Only this package imports deepspeed; only
`deepspeed_patches` touches its private parts. Start with `build`, then `train_engine` (a step)
and `forward` (its passes)."""
