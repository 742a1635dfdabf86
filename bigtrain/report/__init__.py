"""A run as one HTML page: curves, events, predictions, configuration.

No torch, no GPU. Imports `errors`, `system`, the table in `metrics`, numpy and orjson; only
`commands` imports it. It reads a run directory and changes nothing there. Start reading in
`page.py`; the browser's part is in `static/`, with uPlot, which draws the curves.
"""
