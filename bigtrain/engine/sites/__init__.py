"""Local steps and a rare outer step with other sites (DiLoCo, arXiv 2311.08105).

Each site is a complete world with a DeepSpeed engine of its own, which does not change. Imports
`engine.checkpoint`, `engine.optimizers` and `engine.train_engine`; `run.outer_steps` imports it.
Start with `outer_step`, made every ``sites.inner_steps`` steps between sites that meet:
`site_rendezvous` connects the ranks of different sites, `exchange` takes means over them,
`rectangle_exchange` where sites have different layouts (`counterparts`: who holds the same).
`server_step` does the same by way of a server (`outer_server`), in `messages` about `boxes` of
parameters. `outer_update` and `codecs` are the mathematics, without communication; `outer_state` is
what a rank keeps.
"""
