"""The views of a run for people: `report.html`, the live view in a terminal, and `asyncrl status`.

- `report.py` makes the report from `report.html.j2`. `report_*.py` choose its charts and samples. `charts.py` computes
  places in a chart, `chart.html.j2` has its markup.
- `compare.py` makes the page that compares several runs, with the same charts.
- `samples.py` shows samples in a terminal.
- `live.py` renders the live view. `live_from_records.py` makes it, from the run's records and its buffer's status;
  `watch.py` reads these from outside the run.
- `status.py` renders the same two as text and as JSON.
- `headline.py` chooses the first sentence of every view, from the facts of `run_facts.py`.

The views only read. They do not start, end or change a run.
"""
