"""Changes inside a model: isolated documents, chunked loss, kernels, compilation, adapters,
freezing.

Each file changes one thing in a model that transformers built, and is optional. Imports
`models.configuration` and the patch modules; `parallel`, `equivalence`, `export` and the engine
import it. Start with `isolation` and `loss_plan`.
"""
