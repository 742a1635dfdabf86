"""Engine state to and from files, in a form that knows no topology.

Start with `snapshot`. `fragments` finds who holds which part of a parameter under every ZeRO
stage, `division` who writes it, `io` writes and reads them, `tensor_files` is the format, `lazy`
reads a part of it, `layout` says in which files to look.
"""
