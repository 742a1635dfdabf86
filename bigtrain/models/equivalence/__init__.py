"""Trials on a small proxy model: does it compute the same when it is cut, packed or chunked?

They answer this for any architecture, before a run begins, without a table of architectures.
Imports all other folders of `models`; `engine`, `run`, `parity` and the commands import it. Start
with `model_plan`, which tries what a run asks for; `proxy_model` builds the small model,
`thresholds` scales its lengths (windows, chunks) down.
"""
