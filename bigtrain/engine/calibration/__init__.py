"""Measurements of this machine for the planner (``bigtrain plan --calibrate``): `device` measures
matrix products, memory and links, `engine` the overhead of DeepSpeed itself."""
