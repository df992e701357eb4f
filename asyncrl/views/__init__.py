"""What people see of a run: `report.html`, the live view of a terminal, `asyncrl status`.

`report.py` makes the page of `report_*.py` and `charts.py`; `live.py` renders what `live_from_records.py` knows of the
run's own process and `top.py` of its metrics endpoints; `bottleneck.py` says in a sentence what limits the run, for all
three. Nothing here starts, ends or changes a run.
"""
