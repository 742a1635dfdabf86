"""Local steps and a rare outer step with other sites (DiLoCo, arXiv 2311.08105).

Each site is a complete world with a DeepSpeed engine of its own, and nothing of that changes. Start
with `outer_step`: what happens every ``sites.inner_steps`` steps. `outer_update` and `codecs` are
its mathematics, without communication; `meeting` is how ranks of different sites find each other,
`exchange` what travels between them.
"""
