"""`bigtrain tokenize`: units of work, workers, and the commit of the result.

Imports every other room of the data layer but `samples` and `loading`. Start with `job`, then
`units` (what is divided) and `commit` (how the output appears whole).
"""
