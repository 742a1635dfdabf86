"""Measurements of this machine for the planner (``bigtrain plan --calibrate``).

Imports the rest of `engine`; only the command imports it. Start with `device`, which measures
matrix products, memory and links; `engine` measures what DeepSpeed itself costs.
"""
