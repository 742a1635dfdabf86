"""Which tokens sample i of a run is: a pure function of the seed and i.

Shuffle, mixture, packing and the phases of a run that changed its batch. No rank is known here, so
that a run goes on anywhere. Start with `phases` and `mixture`; `token_stream`, `windows` and
`packed_samples` are what samples are cut from.
"""
