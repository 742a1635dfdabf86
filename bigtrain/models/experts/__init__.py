"""What is read from a model's experts during training: choices, router logits, selection biases.

How ranks divide experts is in `parallel`. Imports the patch modules alone; `parallel`,
`equivalence` and the engine import it. Start with `router_logits`.
"""
