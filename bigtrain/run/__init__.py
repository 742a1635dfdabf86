"""Layer 3: one training run: session, loop, metrics, evaluation."""
