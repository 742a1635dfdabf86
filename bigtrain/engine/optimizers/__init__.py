"""Between backward and update: the optimizer inside DeepSpeed's wrappers, gradient norm, skipped
steps."""
