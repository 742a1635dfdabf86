"""Layer 1: Hugging Face models; the only place beside data/tokenization.py that imports transformers."""
