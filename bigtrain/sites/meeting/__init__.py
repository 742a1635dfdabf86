"""How sites meet without a server, and go on when some of them are lost.

Each site's main rank serves a store, its door (`doors`). There those that take part in an outer
step agree on a `roster` (`roll_call`); `start` is how a site comes to the others, and
`site_rendezvous` connects the ranks of a group. `sites.outer_step` and `run.outer_steps`
import it; it imports `engine.startup`. Start with `roll_call`.
"""
