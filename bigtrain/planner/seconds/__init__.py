"""Seconds of the parts of an optimizer step. Pure.

`kernels`: operations of one device. `communication`: collectives. `layer`: a micro-batch in a layer
or the head. `update`: what ends a step. `bigtrain.planner.step_time` adds them up.
"""
