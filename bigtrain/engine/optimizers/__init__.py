"""Between backward and update: the gradient norm, skipped steps."""
