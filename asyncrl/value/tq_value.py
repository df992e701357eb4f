"""A critic with rows on a data plane. Its driver handles only the names of rows; the ranks fetch and write the rows.

    critic = TQValue(config)
    policy.write_to_dataplane(meta, {"rewards": rewards_B, "sample_mask": mask_B})
    critic.get_values_from_meta(meta)                           # adds values under the same keys
    critic.get_advantages_from_meta(meta, GAE(gamma=1.0, lam=0.95, value_lam=0.95))  # adds advantages and returns
    result = critic.train_from_meta(meta, ClippedValueLoss(clip=0.2), gbs=128)

The partitions are the policy's. After RowsLost or CallRefused, the ranks stay usable, and nothing has changed. The one
exception: if the loss of an update fails, the earlier updates of the call stay applied.
"""

from asyncrl.algorithms.token_estimators import TokenEstimator
from asyncrl.data.specs import LP_SEED_FIELDS
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.policy.interfaces import Timer
from asyncrl.policy.meta_driver import MetaDriver, name_fields
from asyncrl.value.lm_value import Value


class TQValue(MetaDriver, Value):
    """A `Value` with rows on the data plane that `config.data_plane` selects."""

    _train_fields = (*LP_SEED_FIELDS, "returns", "values", "weight_versions")

    def get_values_from_meta(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> None:
        """Adds the column `values` of the current critic, and records it in `meta`."""
        self._score("write_values", meta, stage="get_values", micro_batch_size=micro_batch_size, timer=timer)
        name_fields(meta, ["values"])

    def get_advantages_from_meta(
        self, meta: KVBatchMeta, estimator: TokenEstimator, timer: Timer | None = None
    ) -> None:
        """Adds the columns `advantages` [B, S], whitened over the trained tokens of these rows, and `returns`, and
        records them in `meta`. Raises CallRefused if a value is not finite or if `estimator` fails."""
        self._estimate(meta, estimator, timer=timer)
        name_fields(meta, ["advantages", "returns"])
