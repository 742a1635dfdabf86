"""Layers that carry a state along the tokens (gated delta rule, Mamba, short convolutions), with
documents that start from nothing. Start in `functions`, which says what is put in place of what."""
