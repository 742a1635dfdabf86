"""Engine state to and from files, in a form that does not depend on the topology. Start with
`snapshot`; `fragments` are the ranges that a rank holds, `io` writes and reads them, `tensor_file`
is the format."""
