"""Layer 1: Hugging Face models. Beside data/tokenization.py, transformers is imported only here."""
