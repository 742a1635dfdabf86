"""`bigtrain tokenize`: units of work, worker processes, and the commit of the result.

Imports all parts of the data layer except `samples` and `loading`; only the command imports it.
Start with `job`, then `workspace` (how the input is divided into units), `unit_builder` and
`commit` (how the finished dataset appears atomically).
"""
