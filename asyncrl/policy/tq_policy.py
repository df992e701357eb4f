"""The metadata-driven policy: its driver names rows and never holds them; the ranks fetch and write their own.

    policy = TQPolicy(config, dp_cfg=config.data_plane)
    policy.prepare_step(num_samples=128, group_size=8)          # once, or every step: it clears nothing
    policy.write_to_dataplane(meta, {"advantages": advantages_B, "sample_mask": mask_B})
    policy.get_logprobs_from_meta(meta)                         # adds prev_logprobs under the same keys
    result = policy.train_from_meta(meta, loss_fn, gbs=128)
    policy.finish_step(meta)                                    # now they are cleared

After RowsLost or CallRefused the ranks go on. Nothing has changed, but for updates before one whose loss failed.
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
"""The columns that the stages of a step write or read. Others are registered when they are first written."""
TRAIN_TASKS = ("prev_lp", "ref_lp", "train")
"""Consumer tasks of the training partition, by the names that trainers on TransferQueue use."""


class TQPolicy(MetaDriver, Policy):
    """A `Policy` whose rows are on the data plane that `dp_cfg` names, in the partition `tq_partition_id`.

    `dp_cfg` is a `data_plane` section, or the dict of a TransferQueue user (`data_plane_section` has the keys).
    Positional arguments and `kwargs` are those of `Policy`. The attributes `dp_cfg`, `tq_partition_id` and `dp_client`
    are what was passed, and the client of the data plane.
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
        """Registers the partition. Idempotent, and clears nothing: rows of later steps are in it already."""
        self._register(self.tq_partition_id, num_samples, group_size, tasks=TRAIN_TASKS)

    def prepare_val_partition(self, num_samples: int, *, partition_id: str = "val") -> None:
        """Registers a partition of rows that are only evaluated; its one task has the partition's name."""
        self._register(partition_id, num_samples, None, tasks=[partition_id])

    def discard_samples(self, sample_ids: Sequence[str], partition_id: str) -> None:
        """Drops rows by id; what is not there is dropped already."""
        self.dp_client.clear_samples(list(sample_ids), partition_id)

    def finish_step(self, meta: KVBatchMeta) -> None:
        """Drops the step's rows."""
        self.discard_samples(meta.sample_ids, meta.partition_id)

    def rows_outstanding(self) -> dict[str, int]:
        """Rows that were put and not dropped, by partition."""
        return self.dp_client.rows_outstanding()

    def _register(self, partition_id: str, num_samples: int, group_size: int | None, *, tasks: Sequence[str]) -> None:
        self.dp_client.register_partition(partition_id, STEP_FIELDS, num_samples, tasks, group_size)

    # -- columns -------------------------------------------------------------------------------------------------

    def read_from_dataplane(
        self, meta: KVBatchMeta, *, select_fields: Sequence[str], pad_value_dict: Mapping[str, float] | None = None
    ) -> BatchedDataDict:
        """These columns of the rows, as wide as the ranks see them."""
        self._stamp_pad_seqlen(meta)
        padding = {} if pad_value_dict is None else {"pad_value_dict": pad_value_dict}
        return self.dp_client.get_data(meta, select_fields, **padding)

    def write_to_dataplane(self, meta: KVBatchMeta, fields: Mapping[str, Any]) -> None:
        """Adds columns [B], or [B, S] whose padding stays here, to the rows; `meta` names them from then on."""
        if meta.sequence_lengths is None and meta.size:
            meta.sequence_lengths = self.dp_client.lengths_of(meta.sample_ids, meta.partition_id)
        columns = encode(fields, lengths=meta.sequence_lengths)
        self.dp_client.put_samples(meta.sample_ids, meta.partition_id, fields=columns)
        name_fields(meta, columns)

    # -- stages --------------------------------------------------------------------------------------------------

    def get_logprobs_from_meta(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> None:
        """Adds `prev_logprobs`, those of the current weights; `meta` names them from then on."""
        self._score("write_logprobs", meta, stage="get_logprobs", micro_batch_size=micro_batch_size, timer=timer)
        name_fields(meta, ["prev_logprobs"])

    def get_reference_policy_logprobs_from_meta(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> None:
        """Adds `reference_policy_logprobs`, those of the first weights; `meta` names them from then on."""
        stage = "get_reference_policy_logprobs"
        self._score("write_reference_logprobs", meta, stage=stage, micro_batch_size=micro_batch_size, timer=timer)
        name_fields(meta, ["reference_policy_logprobs"])

    def get_advantages_from_meta(
        self, meta: KVBatchMeta, estimator: TokenEstimator, timer: Timer | None = None
    ) -> None:
        """Adds `advantages` [B, S] of an estimator without a critic, such as `DiscountedReturns`, whitened over the
        trained tokens of these rows; `meta` names them from then on. The rows have the columns `estimator.reads`.
        CallRefused when an advantage is not finite, or when `estimator` fails; MissingColumns without a column."""
        self._estimate(meta, estimator, timer=timer)
        name_fields(meta, ["advantages"])


_IGNORED_KEYS = ("storage_capacity", "claim_meta_poll_interval_s", "observability")
"""Keys of a TransferQueue user's dict that have no counterpart here."""


def data_plane_section(dp_cfg: DataPlaneSection | Mapping[str, Any]) -> DataPlaneSection:
    """The section `data_plane` from itself, its fields, or the dict that TransferQueue users pass elsewhere.

    Such a dict has `impl: transfer_queue`, which is `backend` here; `num_storage_units`, which is
    `transfer_queue_storage_units`; `enabled`, which must be true, because rows have no other way; and `backend`, the
    kind of storage, of which `simple` is the one that exists. `storage_capacity`, `claim_meta_poll_interval_s` and
    `observability` do nothing here, with a warning. ValueError for another key or value.

    >>> data_plane_section({"enabled": True, "impl": "transfer_queue", "backend": "simple", "num_storage_units": 4})
    DataPlaneSection(backend='transfer_queue', transfer_queue_storage_units=4)
    """
    if isinstance(dp_cfg, DataPlaneSection):
        return dp_cfg
    fields = dict(dp_cfg)
    if not fields.pop("enabled", True):
        raise ValueError("dp_cfg: enabled is False, but this policy's rows travel on a data plane: set it to True")
    if "impl" in fields:
        impl, storage = fields.pop("impl"), fields.pop("backend", "simple")
        if storage not in ("simple", impl):
            raise ValueError(f"dp_cfg: backend is {storage!r}; with impl={impl!r} it must be 'simple'")
        fields["backend"] = impl
    if "num_storage_units" in fields:
        fields["transfer_queue_storage_units"] = fields.pop("num_storage_units")
    ignored = {name: fields.pop(name) for name in _IGNORED_KEYS if name in fields}
    ignore_arguments("TQPolicy's dp_cfg", (), ignored)
    return DataPlaneSection.model_validate(fields)
