"""Mapping from sample i of a run to its tokens: a pure function of the seed and i.

Shuffle, mixture, packing, and the phases of a run whose data or sequence length changed. Nothing
here depends on ranks, so a run can resume with any world size. Imports `shards`; `loading` and
`run` import it. Start with `phases` and `mixture`; samples are windows of a `token_stream`, packed
by a `packing_plan`, or complete `documents`.
"""
