"""Training a mixture of experts: load statistics, router losses and balancing biases.

How experts are divided over ranks is `models.parallel.experts`. Imports `models` and
`engine.startup`; `train_engine` and the loop import it. Start with `load`, which counts tokens per
expert and exchanged bytes; `router_losses` are added to the loss, `selection_bias` balances without
a loss.
"""
