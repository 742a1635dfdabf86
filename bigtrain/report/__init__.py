"""A run as one page: curves, what happened when, what was predicted, how it was set up.

Pure: no torch, and no GPU is asked for. Imports `errors`, numpy and orjson; `commands` imports it.
It reads what a run directory holds and changes nothing there. Start reading in `page.py`.
"""
