"""From processes to process groups: rendezvous, device, mesh, DeepSpeed's compiled operators.

Start with `process_group`.
"""
