"""What a model's layers cost a token: traced on the meta device, in a process of its own where
torch is needed for nothing else, and kept in the user's cache. Start with `traced_costs`.
"""
