"""The metadata-driven policy: its driver names rows and never holds them; the ranks fetch and write their own.

    policy = TQPolicy(config, model_path=path, dp_cfg=config.data_plane)
    policy.start()
    policy.prepare_step(num_samples=128, group_size=8)          # once, or every step: it clears nothing
    policy.write_to_dataplane(meta, {"advantages": advantages_B, "sample_mask": mask_B})
    policy.get_logprobs_from_meta(meta)                         # adds prev_logprobs under the same keys
    result = policy.train_from_meta(meta, loss_fn, gbs=128)
    policy.finish_step(meta)                                    # now they are cleared

A call that fails with RowsLost changed nothing, and the ranks go on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config.schema import Config, DataPlaneSection
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import CRITIC_FIELDS, DP_TRAIN_FIELDS
from asyncrl.data_plane.clients import TRAIN_PARTITION, open_client
from asyncrl.data_plane.codec import encode
from asyncrl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from asyncrl.errors import RunError
from asyncrl.policy.interfaces import Timer
from asyncrl.policy.lm_policy import Policy
from asyncrl.policy.meta_driver import MetaDriver, name_fields

STEP_FIELDS = (*DP_TRAIN_FIELDS, "weight_versions", "group_ids", *CRITIC_FIELDS)
"""Every column that a stage of a step may write or read."""


class TQPolicy(MetaDriver, Policy):
    """A `Policy` whose rows are on the data plane that `dp_cfg` names, in the partition `tq_partition_id`."""

    def __init__(
        self,
        config: Config,
        *,
        model_path: str,
        dp_cfg: DataPlaneSection | Mapping[str, Any],
        tq_partition_id: str = TRAIN_PARTITION,
    ) -> None:
        config = config.model_copy(update={"data_plane": DataPlaneSection.model_validate(dp_cfg)})
        super().__init__(config, model_path=model_path)
        self._partition = tq_partition_id
        self._client: DataPlaneClient | None = None

    def start(self) -> None:
        self._client = open_client(self._config)
        super().start()

    def shutdown(self) -> bool:
        if self._client is not None:
            self._client.close()
        return super().shutdown()

    # -- partitions ----------------------------------------------------------------------------------------------

    def prepare_step(self, num_samples: int, group_size: int | None = None) -> None:
        """Registers the partition. Idempotent, and clears nothing: rows of later steps are in it already."""
        self._register(self._partition, num_samples, group_size)

    def prepare_val_partition(self, num_samples: int, *, partition_id: str = "val") -> None:
        """Registers a partition of rows that are only looked at."""
        self._register(partition_id, num_samples, None)

    def discard_samples(self, sample_ids: Sequence[str], partition_id: str) -> None:
        """Drops rows by id; what is not there is dropped already."""
        self._open.clear_samples(list(sample_ids), partition_id)

    def finish_step(self, meta: KVBatchMeta) -> None:
        """Drops the step's rows."""
        self.discard_samples(meta.sample_ids, meta.partition_id)

    def rows_outstanding(self) -> dict[str, int]:
        """Rows that were put and not dropped, by partition."""
        return self._open.rows_outstanding()

    def _register(self, partition_id: str, num_samples: int, group_size: int | None) -> None:
        self._open.register_partition(partition_id, STEP_FIELDS, num_samples, ["train"], group_size)

    # -- columns -------------------------------------------------------------------------------------------------

    def read_from_dataplane(
        self, meta: KVBatchMeta, *, select_fields: Sequence[str], pad_value_dict: Mapping[str, float] | None = None
    ) -> BatchedDataDict:
        """These columns of the rows, as wide as the ranks see them."""
        self._stamp_pad_seqlen(meta)
        return self._open.get_data(meta, select_fields, pad_value_dict=pad_value_dict)

    def write_to_dataplane(self, meta: KVBatchMeta, fields: Mapping[str, Any]) -> None:
        """Adds columns [B], or [B, S] whose padding stays here, to the rows; `meta` names them from then on."""
        columns = encode(fields, lengths=meta.sequence_lengths)
        self._open.put_samples(meta.sample_ids, meta.partition_id, fields=columns)
        name_fields(meta, fields)

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

    @property
    def _open(self) -> DataPlaneClient:
        if self._client is None:
            raise RunError("the policy was not started: its data plane is not open")
        return self._client
