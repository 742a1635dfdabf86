"""Equivalence tests on a proxy model: sharded, packed and chunked against plain.

They answer this for any architecture, before a run begins, without a table of architectures.
Imports all other folders of `models`; `engine`, `run`, `parity` and the commands import it. Start
with `model_plan`, which tests what a run asks for; `proxy_model` builds the small model,
`thresholds` scales its lengths (windows, chunks) down.
"""
