"""What a machine reaches, measured for the planner by ``bigtrain plan --calibrate``.

Imports the rest of `engine`; only the command imports it. `device` measures products, memory and
links, `engine` what DeepSpeed itself costs.
"""
