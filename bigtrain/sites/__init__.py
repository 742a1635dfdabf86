"""Local steps and a rare outer step with other sites (DiLoCo, arXiv 2311.08105).

Each site is a complete world with a DeepSpeed engine of its own, which does not change. Imports
`engine.checkpoint`, `engine.optimizers` and `engine.train_engine`; `run.outer_steps` imports it.
Start with `outer_step`, made every ``sites.inner_steps`` steps between sites that meet: `meeting`
agrees which of them take part, and connects their ranks; `attempt` is what a rank gives and takes,
`exchange` takes means over sites, `rectangle_exchange` where they have different layouts
(`counterparts`: who holds the same). `server_step` does the same by way of a server
(`outer_server`), in messages about `boxes` of parameters. `outer_update` and `codecs` are the
mathematics, without communication; `outer_state` is what a rank keeps.
"""
