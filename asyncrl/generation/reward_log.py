"""What reward code prints, in the run's directory: `logs/reward.log`, one line for each printed line."""

import logging
from datetime import datetime
from pathlib import Path

MAX_BYTES = 64 * 2**20
"""Largest size of the file. Replicas of one machine share it."""

logger = logging.getLogger(__name__)


class RewardLog:
    """Appends lines to `path`. They are logged instead when its folder is not on this node.

    The file is opened for each line: the folder is made by the learner, which may start after the replica.
    """

    def __init__(self, path: Path, *, replica: str) -> None:
        self._path = path
        self._replica = replica
        self._failed = False

    def __call__(self, line: str) -> None:
        """Writes one line. An error of the disk is logged once; lines are lost until the disk takes them again."""
        try:
            self._append(line)
        except FileNotFoundError:
            logger.info("reward code: %s", line)
        except OSError as error:
            if not self._failed:
                self._failed = True
                logger.warning("cannot write %s (%s): lines that reward code prints are lost", self._path, error)
        else:
            self._failed = False

    def _append(self, line: str) -> None:
        time = datetime.now().isoformat(sep=" ", timespec="milliseconds")
        with self._path.open("ab", buffering=0) as file:  # one write a line: those of several replicas do not mix
            size = file.tell()
            if size < MAX_BYTES:
                file.write(f"{time} {self._replica}: {line}\n".encode(errors="replace"))
            if size < MAX_BYTES <= file.tell():
                file.write(f"the log has reached {MAX_BYTES // 2**20} MiB; no more lines are written\n".encode())
