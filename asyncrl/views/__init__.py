"""What people see of a run: `report.html`, the live view of a terminal, `asyncrl status`.

`report.py` makes the page of `report_*.py` and `charts.py`; `live.py` renders what `live_from_records.py` knows of the
run's own process and `top.py` of its metrics endpoints. `headline.py` chooses the first sentence of all of them, from
the facts that `run_facts.py` and `top.py` gather. Nothing here starts, ends or changes a run.
"""
