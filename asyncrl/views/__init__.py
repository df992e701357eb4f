"""The views of a run for people: `report.html`, the live view in a terminal, and `asyncrl status`.

- `report.py` makes the report from the sections of `report_*.py` and the charts of `charts.py`.
- `live.py` renders the live view. Its data comes from the run's records (`live_from_records.py`, in the run's own
  process) or from the run's metrics endpoints (`top.py`).
- `status.py` renders the answer of the buffer.
- `headline.py` chooses the first sentence of every view, from the facts of `run_facts.py` and `top.py`.

The views only read. They do not start, end or change a run.
"""
