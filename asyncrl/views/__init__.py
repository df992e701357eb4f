"""The views of a run for people: `report.html`, the live view in a terminal, and `asyncrl status`.

- `report.py` makes the report from `report.html.j2`. `report_*.py` choose its charts and samples. `charts.py` computes
  coordinates in a chart, and `chart.html.j2` has its markup.
- `compare.py` makes the page that compares several runs, with the same charts.
- `samples.py` shows samples in a terminal.
- `run_view.py` gathers the facts of a run from its records and its buffer's status, for the modules below.
- `health.py` has the rules of the health notes (warnings about the training), and `health_finds.py` the functions that
  find their faults. `evidence.py` cuts the records for these functions, `setting.py` has the facts about a run that do
  not change, and `health_docs.py` writes docs/health.md.
- `headline.py` chooses the first sentence of every view: the first note, or which side waits for the other.
- `live.py` renders the live view; `watch.py` reads records and status from outside the run.
- `status_text.py` renders the status as text and as JSON.

The views only read the run's records and status. They do not start, end or change a run.
"""
