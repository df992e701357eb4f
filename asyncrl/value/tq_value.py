"""A critic with rows on a data plane. Its driver handles only the names of rows; the ranks fetch and write the rows.

    critic = TQValue(config)
    policy.write_to_dataplane(meta, {"rewards": rewards_B, "sample_mask": mask_B})
    critic.get_values_from_meta(meta)                           # adds values under the same keys
    critic.get_advantages_from_meta(meta, GAE(gamma=1.0, lam=0.95, value_lam=0.95))  # adds advantages and returns
    result = critic.train_from_meta(meta, ClippedValueLoss(clip=0.2), gbs=128)

The critic uses the partitions of the data plane that the policy has registered. After RowsLost or CallRefused, the
ranks stay usable, and nothing has changed. The one exception: if the loss of an update fails, the earlier updates of
the call stay applied.
"""

from typing import Any

from asyncrl.config.schema import Config
from asyncrl.data.specs import BRANCH, LP_SEED_FIELDS
from asyncrl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from asyncrl.data_plane.rows import Rows
from asyncrl.ranks.timer import Timer
from asyncrl.value.lm_value import Value
from asyncrl.value.worker import ValueWorker


class TQValue(Value):
    """A critic (`Value`) whose ranks read and write rows on the data plane that `config.data_plane` names. `dp_client`
    is an open client of this process; without it, the first use opens one."""

    def __init__(self, config: Config, *, dp_client: DataPlaneClient | None = None, **options: Any) -> None:
        super().__init__(config, rows=Rows(config, client=dp_client), **options)

    def get_values_from_meta(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> None:
        """Adds the column `values`, as the critic predicts them now, to the rows, and records the column in `meta`."""
        branches = [BRANCH] if BRANCH in (meta.fields or ()) else []
        fields, method = (*LP_SEED_FIELDS, *branches), ValueWorker.get_values
        self._add_columns(meta, fields, {"values": "values"}, timer, method, micro_batch_size=micro_batch_size)
