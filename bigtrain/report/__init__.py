"""A run as one page: curves, what happened when, what was predicted, how it was set up.

No torch, and no GPU is asked for. Imports `errors`, `system`, numpy and orjson; `commands` imports
it. It reads what a run directory holds and changes nothing there. Start reading in `page.py`; what
the browser does with it is in `static/`, beside uPlot, which draws the curves.
"""
