"""What the machine and its launcher give a process: cores, ranks, signals, ports, versions, files
that appear whole.

The ground floor: imports `bigtrain.errors` and the standard library alone (`files.file_checksum`
takes xxhash when it is called), so anything may import it, also a probe on a bare host. Start with
`world` (which rank this is) and `files`.
"""
