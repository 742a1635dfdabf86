"""The server of `bigtrain outer-server`: global weights and outer momentum for sites that can open
connections only outwards.

Imports the codecs, messages and mathematics of `sites`; only the command imports it. Start
with `ledger`, which decides who takes part in an outer step; `global_weights` makes it, `storage`
keeps on disk what must not be lost, `app` is the HTTP side, on Starlette and uvicorn (the extra
``bigtrain[sites]``).
"""
