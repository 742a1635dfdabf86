"""What a layout costs: floating-point operations of a model's steps.

Pure: no torch. Imports `settings` and `system`; `run` and the commands import it.
"""
