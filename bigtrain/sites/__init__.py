"""Local steps and a rare outer step with other sites (DiLoCo, arXiv 2311.08105).

Each site is a complete world with a DeepSpeed engine of its own, which does not change. Imports
`engine.checkpoint`, `engine.optimizers` and `engine.train_engine`; `run.outer_steps` imports it.

Start with `outer_step`, made every ``sites.inner_steps`` steps. `attempt` is one attempt at it;
`direct` makes it by connections between the ranks of sites (`exchange`, `peers`), `through_server`
by a server that holds the weights, in messages about `rectangles` of parameters. `membership` is
the site's side of the server (`server`), which decides who takes part in both; `protocol` is what
they send. `outer_optimizer` and `codecs` are the mathematics, without communication; `outer_state`
is what a rank keeps.
"""
