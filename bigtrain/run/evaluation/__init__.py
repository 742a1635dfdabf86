"""How good the model is: loss on held-out data."""
