"""`make gpu-check`: what a GPU has to show of bigtrain, in under ten minutes. Start at `runner.py`.

One file a subject; each part is a function of `Setup` that returns a `Part` (`results.py`) and runs
in a process of its own. With ``--device cpu --tiny`` the same lines run on a CPU, which the tests
do; what a CPU lacks is in `stand_ins.py`.
"""

from bigtrain.system.processes import hide_torchao_from_transformers

# torchao initializes CUDA as it is imported, after which no process can be forked that uses it.
hide_torchao_from_transformers()
