"""What is read of a model's experts as it trains: choices, logits of routers, selection biases.

What divides experts among processes is in `parallel`. Imported by `parallel`, `equivalence` and the
engine; start reading with `router_logits`.
"""
