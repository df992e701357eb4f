"""A critic with rows on a data plane. Its driver handles only the names of rows; the ranks fetch and write the rows.

    critic = TQValue(config)
    policy.write_to_dataplane(meta, {"rewards": rewards_B, "sample_mask": mask_B})
    critic.get_values_from_meta(meta)                           # adds values under the same keys
    critic.get_advantages_from_meta(meta, GAE(gamma=1.0, lam=0.95, value_lam=0.95))  # adds advantages and returns
    result = critic.train_from_meta(meta, ClippedValueLoss(clip=0.2), gbs=128)

The partitions are the policy's. After RowsLost or CallRefused, the ranks stay usable, and nothing has changed. The one
exception: if the loss of an update fails, the earlier updates of the call stay applied.
"""

from typing import Any

from asyncrl.algorithms.interfaces import ValueLossFunction
from asyncrl.algorithms.token_estimators import TokenEstimator
from asyncrl.config.schema import Config
from asyncrl.data.specs import BRANCH, LP_SEED_FIELDS
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.ranks.driver import ignore_arguments
from asyncrl.ranks.named_rows import DataPlane, NamedRows
from asyncrl.ranks.timer import Timer
from asyncrl.value.lm_value import Value
from asyncrl.value.worker import ValueWorker


class TQValue(Value):
    """A critic (`Value`) whose ranks read and write rows on the data plane that `config.data_plane` names."""

    _data_plane: DataPlane

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__(config, data_plane=DataPlane(config), **options)

    def get_values_from_meta(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> None:
        """Adds the column `values` of the current critic, and records it in `meta`."""
        branches = [BRANCH] if BRANCH in (meta.fields or ()) else []
        rows = NamedRows(meta, self._data_plane, (*LP_SEED_FIELDS, *branches), writes={"values": "values"})
        self._write(rows, timer, ValueWorker.get_values, micro_batch_size=micro_batch_size)

    def get_advantages_from_meta(
        self, meta: KVBatchMeta, estimator: TokenEstimator, timer: Timer | None = None
    ) -> None:
        """Adds the columns `advantages` [B, S], whitened over the trained tokens of these rows, and `returns`, and
        records them in `meta`. Raises CallRefused if a value is not finite or if `estimator` fails."""
        writes = {"advantages": "advantages", "returns": "returns"}
        rows = NamedRows(meta, self._data_plane, estimator.reads, writes=writes)
        self._write(rows, timer, ValueWorker.get_advantages, estimator)

    def train_from_meta(
        self,
        meta: KVBatchMeta,
        loss_fn: ValueLossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Trains like `train`, on the columns that the loss reads, with the same result. `TQPolicy.train_from_meta`
        explains the columns and the check of token ages, which are the same here."""
        ignore_arguments("train_from_meta", (), kwargs)
        rows = NamedRows(meta, self._data_plane, (*LP_SEED_FIELDS, "returns", "values", "weight_versions"))
        return self._train(rows, loss_fn, eval_mode, gbs, mbs, timer)
