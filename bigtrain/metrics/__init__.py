"""Metrics of a run: the rows that a logged step has, and what user code records.

Pure: nothing but the standard library. `engine`, `run` and the report import it. Start with
`step_metrics`, the table of metrics; `recording` holds the values that objectives and callbacks
record until a step is logged.
"""
