"""`make gpu-roofline`: the kernels of a traced optimizer step, priced on a device that is not here.

`recorder` records the kernels of a step on fake CUDA tensors, `pricing` gives each its seconds,
`fused_layer` asks Inductor for the kernels of a compiled layer, `triton_launches` counts the bytes
of Liger's, `contenders` builds what is traced, and `rows` has the measured rows that the prices are
compared with. Start at `__main__`.
"""
