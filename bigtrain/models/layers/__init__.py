"""What is done inside a model at run time: attention of documents, loss, kernels, compilation,
freezing.

Each file changes one thing in a model that transformers built, and can be left out. Imported by
`parallel`, `equivalence` and the engine.
"""
