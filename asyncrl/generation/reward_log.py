"""Writes the lines that reward code prints to `logs/reward.log` in the run's directory."""

import logging
from datetime import datetime
from pathlib import Path

MAX_BYTES = 64 * 2**20
"""Largest size of the file. All replicas of one machine write to the same file."""

logger = logging.getLogger(__name__)


class RewardLog:
    """Appends lines to `path`. If the folder of `path` does not exist on this node, logs the lines instead.

    The learner makes the folder and may start after the replica, so the file is opened for each line.
    """

    def __init__(self, path: Path, *, replica: str) -> None:
        self._path = path
        self._replica = replica
        self._failed = False

    def __call__(self, line: str) -> None:
        """Writes one line. Logs the first of several disk errors in a row; lines are lost until a write succeeds."""
        try:
            self._append(line)
        except FileNotFoundError:
            logger.info("reward code: %s", line)
        except OSError as error:
            if not self._failed:
                self._failed = True
                logger.warning(
                    "cannot write %s (%s), so lines that reward code prints are lost; free space or fix the "
                    "permissions of its folder",
                    self._path,
                    error,
                )
        else:
            self._failed = False

    def _append(self, line: str) -> None:
        time = datetime.now().isoformat(sep=" ", timespec="milliseconds")
        with self._path.open("ab", buffering=0) as file:  # one write per line, so lines of two replicas do not mix
            size = file.tell()
            if size < MAX_BYTES:
                file.write(f"{time} {self._replica}: {line}\n".encode(errors="replace"))
            if size < MAX_BYTES <= file.tell():
                file.write(f"the log has reached {MAX_BYTES // 2**20} MiB; no more lines are written\n".encode())
