"""Local steps and a rare outer step with other sites (DiLoCo, arXiv 2311.08105).

Each site is a complete world with a DeepSpeed engine of its own, which does not change. Imports
`engine.checkpoint`, `engine.optimizers` and `engine.train_engine`; `run.outer_steps` imports it.
Start with `outer_step`, made every ``sites.inner_steps`` steps. `outer_update` and `codecs` are its
mathematics, without communication; `site_rendezvous` connects the ranks of different sites,
`exchange` takes means over them.
"""
