"""Seconds of the parts of an optimizer step. Pure.

`kernels`: operations of one device. `communication`: collectives. `layer`: a micro-batch in a layer
or the head, or of the end of a step. `bigtrain.planner.step_time` adds them up.
"""
