"""Costs of a model's layers for each token: traced on the meta device, in a separate process if the
caller needs torch for nothing else. Start with `traced_costs`."""
