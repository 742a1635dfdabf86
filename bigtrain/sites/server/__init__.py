"""The server of `bigtrain outer-server`: membership of sites, and global weights for those that can
open connections only outwards.

Only the command imports it. Start with `state`: `members` (sites, events, outer steps) is shared by
the two ways to exchange, `deliveries` (through the server, with `global_weights`) and `direct`
(with the rules of `plan`). `store` is the database, `app` the HTTP side (it needs the extra
``sites``), with the limits of `connections`.
"""
