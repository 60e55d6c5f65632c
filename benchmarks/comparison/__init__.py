"""The harness of ``benchmarks/sealed_load.py``: the model, one process per timed run, statistics, tables, a plot."""
