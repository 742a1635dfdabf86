"""Engine state to and from files, in a form that does not depend on the topology.

Imports `models` and the rest of `engine` but `sites`; `run`, `parity` and `sites` import it. Start
with `snapshot`. `fragments` are the parts of parameters that a rank holds under every ZeRO stage,
`division` assigns them to ranks for writing, `io` writes and reads them, `tensor_file` is the
format, `tensor_files` finds parts in many files and checks that they cover a tensor, `lazy` reads
some of them, `layout` lists the files that contain each part.
"""
