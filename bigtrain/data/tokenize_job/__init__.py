"""`bigtrain tokenize`: units of work, worker processes, and the commit of the result.

Imports the other parts of the data layer except `samples` and `loading`; only the command imports
it. Start with `job`, then `units` (how the input is divided) and `commit` (how the finished dataset
appears atomically).
"""
