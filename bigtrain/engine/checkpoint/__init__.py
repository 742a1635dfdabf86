"""Engine state to and from files, in a form that does not depend on the topology.

Imports `models` and the rest of `engine` but `sites`; `run`, `parity` and `sites` import it. Start
with `snapshot`. `fragments` are the parts of parameters that a rank holds under every ZeRO stage,
`division` says which rank writes which, `io` writes and reads them, `tensor_file` is the format,
`tensor_files` finds parts among many,
`cover` says whether the parts of a tensor make up all of it, `lazy` reads some,
`layout` says which files hold what.
"""
