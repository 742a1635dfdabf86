"""Tokenizers: loaded, trained, identified, and the fast encoders proven equal to the reference.

The only room of the data layer with transformers. Start with `tokenizer`; `selection` takes the
fastest encoder that agrees with it (`equivalence`).
"""
