"""Proof of the GPU code on a machine without a GPU: whole optimizer steps of bigtrain's engine over
DeepSpeed's on fake CUDA tensors, in worlds of torch's `fake` process group.

`fake_cuda.py` makes torch's CPU wheel accept CUDA devices for fake tensors, `trace.py` records what
a step does, `cases.py` lists the runs, `step.py` traces one. Start: ``make gpu-proof``.

Found: tensors on the wrong device, reads of device values, wrong dtypes and sizes of collectives,
bytes of live tensors. Not found: wrong numbers, kernels that do not compile, races of streams.
"""
