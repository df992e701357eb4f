"""A policy with rows on a data plane. Its driver handles only the names of rows; the ranks fetch and write the rows.

    policy = TQPolicy(config, dp_cfg=config.data_plane)
    policy.prepare_step(num_samples=128, group_size=8)          # once or every step; it clears nothing
    policy.write_to_dataplane(meta, {"advantages": advantages_B, "sample_mask": mask_B})
    policy.get_logprobs_from_meta(meta)                         # adds prev_logprobs under the same keys
    result = policy.train_from_meta(meta, loss_fn, gbs=128)
    policy.finish_step(meta)                                    # clears the step's rows

After RowsLost or CallRefused, the ranks stay usable, and nothing has changed. The one exception: if the loss of an
update fails, the earlier updates of the call stay applied.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.algorithms.token_estimators import OUTCOME, TokenEstimator
from asyncrl.config.schema import Config, DataPlaneSection
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import CRITIC_FIELDS, DP_TRAIN_FIELDS
from asyncrl.data_plane.clients import TRAIN_PARTITION
from asyncrl.data_plane.codec import encode
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.policy.interfaces import Timer
from asyncrl.policy.lm_policy import Policy
from asyncrl.policy.meta_driver import MetaDriver, name_fields
from asyncrl.policy.rank_driver import ignore_arguments

STEP_FIELDS = (*DP_TRAIN_FIELDS, "weight_versions", "group_ids", OUTCOME, *CRITIC_FIELDS)
"""The columns that the stages of a step write or read. Other columns are registered when they are first written."""
TRAIN_TASKS = ("prev_lp", "ref_lp", "train")
"""Consumer tasks of the training partition, with the names that trainers on TransferQueue use."""


class TQPolicy(MetaDriver, Policy):
    """A `Policy` with rows on the data plane that `dp_cfg` selects, in the partition `tq_partition_id`.

    `dp_cfg` is a `data_plane` section, or the dict of a TransferQueue user (`data_plane_section` lists its keys).
    Positional arguments and `kwargs` are those of `Policy`. The attributes `dp_cfg` and `tq_partition_id` are the
    arguments, and `dp_client` is the client of the data plane.
    """

    _train_fields = (*DP_TRAIN_FIELDS, "weight_versions")

    def __init__(
        self,
        config: Config,
        *args: Any,
        dp_cfg: DataPlaneSection | Mapping[str, Any],
        tq_partition_id: str = TRAIN_PARTITION,
        **kwargs: Any,
    ) -> None:
        config = config.model_copy(update={"data_plane": data_plane_section(dp_cfg)})
        super().__init__(config, *args, **kwargs)
        self.dp_cfg = dp_cfg
        self.tq_partition_id = tq_partition_id

    # -- partitions ----------------------------------------------------------------------------------------------

    def prepare_step(self, num_samples: int, group_size: int | None = None) -> None:
        """Registers the partition. Idempotent. It clears nothing, because the partition may have rows of later
        steps."""
        self._register(self.tq_partition_id, num_samples, group_size, tasks=TRAIN_TASKS)

    def prepare_val_partition(self, num_samples: int, *, partition_id: str = "val") -> None:
        """Registers a partition for rows that are only evaluated. Its single task has the partition's name."""
        self._register(partition_id, num_samples, None, tasks=[partition_id])

    def discard_samples(self, sample_ids: Sequence[str], partition_id: str) -> None:
        """Removes rows by id. Ids that are not there are ignored, because these rows are already removed."""
        self.dp_client.clear_samples(list(sample_ids), partition_id)

    def finish_step(self, meta: KVBatchMeta) -> None:
        """Removes the step's rows."""
        self.discard_samples(meta.sample_ids, meta.partition_id)

    def rows_outstanding(self) -> dict[str, int]:
        """Returns the number of rows that were written and not removed, by partition."""
        return self.dp_client.rows_outstanding()

    def _register(self, partition_id: str, num_samples: int, group_size: int | None, *, tasks: Sequence[str]) -> None:
        self.dp_client.register_partition(partition_id, STEP_FIELDS, num_samples, tasks, group_size)

    # -- columns -------------------------------------------------------------------------------------------------

    def read_from_dataplane(
        self, meta: KVBatchMeta, *, select_fields: Sequence[str], pad_value_dict: Mapping[str, float] | None = None
    ) -> BatchedDataDict:
        """Returns these columns of the rows, padded to the same width as on the ranks."""
        self._stamp_pad_seqlen(meta)
        padding = {} if pad_value_dict is None else {"pad_value_dict": pad_value_dict}
        return self.dp_client.get_data(meta, select_fields, **padding)

    def write_to_dataplane(self, meta: KVBatchMeta, fields: Mapping[str, Any]) -> None:
        """Adds columns to the rows and records them in `meta`. Columns are [B] or [B, S]; padding is not sent."""
        if meta.sequence_lengths is None and meta.size:
            meta.sequence_lengths = self.dp_client.lengths_of(meta.sample_ids, meta.partition_id)
        columns = encode(fields, lengths=meta.sequence_lengths)
        self.dp_client.put_samples(meta.sample_ids, meta.partition_id, fields=columns)
        name_fields(meta, columns)

    # -- stages --------------------------------------------------------------------------------------------------

    def get_logprobs_from_meta(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> None:
        """Adds the column `prev_logprobs` under the current weights, and records it in `meta`."""
        self._score("write_logprobs", meta, stage="get_logprobs", micro_batch_size=micro_batch_size, timer=timer)
        name_fields(meta, ["prev_logprobs"])

    def get_reference_policy_logprobs_from_meta(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> None:
        """Adds the column `reference_policy_logprobs` under the initial weights, and records it in `meta`."""
        stage = "get_reference_policy_logprobs"
        self._score("write_reference_logprobs", meta, stage=stage, micro_batch_size=micro_batch_size, timer=timer)
        name_fields(meta, ["reference_policy_logprobs"])

    def get_advantages_from_meta(
        self, meta: KVBatchMeta, estimator: TokenEstimator, timer: Timer | None = None
    ) -> None:
        """Adds the column `advantages` [B, S] of an estimator without a critic, such as `DiscountedReturns`, and
        records it in `meta`. The advantages are whitened over the trained tokens of these rows.

        The rows must have the columns `estimator.reads`. Raises CallRefused if an advantage is not finite or if
        `estimator` fails. Raises MissingColumns if a column is missing.
        """
        self._estimate(meta, estimator, timer=timer)
        name_fields(meta, ["advantages"])


_IGNORED_KEYS = ("storage_capacity", "claim_meta_poll_interval_s", "observability")
"""Keys of a TransferQueue user's dict that have no counterpart in asyncrl."""


def data_plane_section(dp_cfg: DataPlaneSection | Mapping[str, Any]) -> DataPlaneSection:
    """Returns the section `data_plane`, from a section, from its fields, or from the dict of a TransferQueue user.

    Such a dict has these keys:

    - `impl: transfer_queue`, which is `backend` in the section;
    - `num_storage_units`, which is `transfer_queue_storage_units` in the section;
    - `enabled`, which must be true, because the rows need a data plane;
    - `backend`, the kind of storage, which must be `simple`, because no other kind exists.

    `storage_capacity`, `claim_meta_poll_interval_s` and `observability` have no effect and give a warning. Raises
    ValueError for any other key or value.

    >>> data_plane_section({"enabled": True, "impl": "transfer_queue", "backend": "simple", "num_storage_units": 4})
    DataPlaneSection(backend='transfer_queue', transfer_queue_storage_units=4)
    """
    if isinstance(dp_cfg, DataPlaneSection):
        return dp_cfg
    fields = dict(dp_cfg)
    if not fields.pop("enabled", True):
        raise ValueError(
            "dp_cfg: enabled is False, but the rows of this policy need a data plane; set enabled to True, or use "
            "Policy"
        )
    if "impl" in fields:
        impl, storage = fields.pop("impl"), fields.pop("backend", "simple")
        if storage not in ("simple", impl):
            raise ValueError(
                f"dp_cfg: backend is {storage!r}, but with impl={impl!r} it must be 'simple'; set it to that"
            )
        fields["backend"] = impl
    if "num_storage_units" in fields:
        fields["transfer_queue_storage_units"] = fields.pop("num_storage_units")
    ignored = {name: fields.pop(name) for name in _IGNORED_KEYS if name in fields}
    ignore_arguments("TQPolicy's dp_cfg", (), ignored)
    return DataPlaneSection.model_validate(fields)
