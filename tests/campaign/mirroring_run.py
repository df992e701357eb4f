"""Writes records and checkpoints as a learner does, without training, and mirrors them until it is killed.

python tests/campaign/mirroring_run.py FOLDER URL
"""

import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path

from made_up_run import make_step
from mirrored_scene import config_in, save

from asyncrl.checkpoints.directory import complete_steps, kept_steps
from asyncrl.config.schema import CheckpointSection
from asyncrl.deployment import mirror
from asyncrl.deployment.mirror import Mirror, Store
from asyncrl.deployment.resuming import chosen_checkpoint, no_checkpoint
from asyncrl.deployment.run_dir import RunDir

STEP_S = 0.01
"""Time between two steps. A kill within a second then finds a checkpoint that is being sent."""
CHECKPOINT_BYTES = 2**23


def main() -> None:
    folder, url = Path(sys.argv[1]), sys.argv[2]
    there = (folder / "quick" / "run.json").exists()
    keep = CheckpointSection(keep=2)
    mirror.EVERY_S = 0.0
    with RunDir.create(
        config_in(folder, learner={"total_steps": 10**6}),
        choose=partial(chosen_checkpoint, step=None) if there else no_checkpoint,
    ) as run:
        step = run.resumed.step if run.resumed is not None else 0
        sending = Mirror(Store(url), run.path, nonce=run.nonce, lineage=run.lineage, keep=keep)
        sending.start()
        print("ready", flush=True)
        while True:
            run.append_step(make_step(step))
            (run.path / "samples" / f"step-{step}.jsonl").write_bytes(b"x" * 100)
            step += 1
            if step % 5 == 0:
                run.sync()
                save(run, step, content=os.urandom(CHECKPOINT_BYTES), incarnation=run.lineage.incarnation)
                steps = complete_steps(run.checkpoints)
                for old in {*steps} - kept_steps(keep, steps, best=sending.reading):
                    shutil.rmtree(run.checkpoints / f"step-{old}")
            time.sleep(STEP_S)


if __name__ == "__main__":
    main()
