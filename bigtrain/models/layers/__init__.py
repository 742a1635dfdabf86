"""Optional changes inside a model: isolated documents, chunked loss, kernels, compilation,
adapters. Imports `models.configuration` and the patch modules; `parallel` and `equivalence` import
it."""
