"""A program that joins a cluster once, and answers each line (the name of a run) with the run's status as JSON.

    python status_answers.py 127.0.0.1:6379

`asyncrl status` takes seconds of CPU time, most of them to import Ray and to join the cluster. A test that polls would
slow down what it waits for.
"""

import asyncio
import json
import sys
from datetime import UTC, datetime


def answer(run: str) -> str:
    """Returns the status of a run as one line; an empty object if there is no such run."""
    from asyncrl.coordinator.coordinator import Coordinator
    from asyncrl.deployment.shared_actors import find_run
    from asyncrl.errors import RunError
    from asyncrl.views.run_view import run_view
    from asyncrl.views.status_text import status_json

    try:
        status = asyncio.run(find_run(run).call(Coordinator.status))
    except RunError:
        return "{}"
    view = run_view([], recent=False, status=status)
    return json.dumps(json.loads(status_json(status, view, now=datetime.now(UTC))))


def main() -> None:
    from asyncrl.deployment.local_clusters import use_ray_token

    use_ray_token()  # before Ray is imported
    from asyncrl.deployment.cluster import join

    join(sys.argv[1], namespace="status")
    for line in sys.stdin:
        print(answer(line.strip()), flush=True)


if __name__ == "__main__":
    main()
