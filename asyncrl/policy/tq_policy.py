"""A policy whose rows are on a data plane. The driver handles only the names of rows; the ranks fetch and write rows.

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

from asyncrl.algorithms.token_estimators import OUTCOME
from asyncrl.config.schema import Config, DataPlaneSection
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.sharding import DynamicBatchingArgs, SequencePackingArgs
from asyncrl.data.specs import BRANCH, CRITIC_FIELDS, DP_TRAIN_FIELDS, LP_SEED_FIELDS, SUPPORT
from asyncrl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from asyncrl.data_plane.rows import TRAIN_PARTITION, Rows
from asyncrl.policy.lm_policy import Policy
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.driver import ignore_arguments
from asyncrl.ranks.named_rows import look_up_lengths, stamp_width, write_columns
from asyncrl.ranks.plan import BatchingPlan
from asyncrl.ranks.timer import Timer

STEP_FIELDS = (*DP_TRAIN_FIELDS, "weight_versions", "group_ids", OUTCOME, *CRITIC_FIELDS)
"""The columns that the stages of a step write or read. Other columns are registered when they are first written."""
TRAIN_TASKS = ("prev_lp", "ref_lp", "train")
"""Consumer tasks of the training partition, with the names that trainers on TransferQueue use."""


class TQPolicy(Policy):
    """A `Policy` with rows on the data plane that `dp_cfg` selects, in the partition `tq_partition_id`.

    `dp_cfg` is a `data_plane` section, or the dict of a TransferQueue user (`data_plane_section` lists its keys).
    Positional arguments and `kwargs` are those of `Policy`. The attributes `dp_cfg` and `tq_partition_id` are the
    arguments. `dp_client` is an open client of this process; without it, the first use opens one.
    """

    def __init__(
        self,
        config: Config,
        *args: Any,
        dp_cfg: DataPlaneSection | Mapping[str, Any],
        tq_partition_id: str = TRAIN_PARTITION,
        dp_client: DataPlaneClient | None = None,
        **kwargs: Any,
    ) -> None:
        config = config.model_copy(update={"data_plane": data_plane_section(dp_cfg)})
        super().__init__(config, *args, rows=Rows(config, client=dp_client), **kwargs)
        self.dp_cfg = dp_cfg
        self.tq_partition_id = tq_partition_id

    @property
    def dp_client(self) -> DataPlaneClient:
        """The data-plane client of this process. The first use opens it."""
        return self._rows.client

    # -- partitions ----------------------------------------------------------------------------------------------

    def prepare_step(self, num_samples: int, group_size: int | None = None) -> None:
        """Registers the policy's partition of the data plane with the columns and tasks of a step. Idempotent. It
        clears no rows, because the partition may have rows of later steps."""
        self.dp_client.register_partition(self.tq_partition_id, STEP_FIELDS, num_samples, TRAIN_TASKS, group_size)

    def prepare_val_partition(self, num_samples: int, *, partition_id: str = "val") -> None:
        """Registers a partition for rows that are only evaluated. Its single task has the partition's name."""
        self.dp_client.register_partition(partition_id, STEP_FIELDS, num_samples, [partition_id])

    def discard_samples(self, sample_ids: Sequence[str], partition_id: str) -> None:
        """Removes rows by id. Ids without a row are ignored, because their rows are already removed."""
        self._rows.patiently(lambda client: client.clear_samples(list(sample_ids), partition_id))

    def finish_step(self, meta: KVBatchMeta) -> None:
        """Removes the step's rows, which `meta` names."""
        self.discard_samples(meta.sample_ids, meta.partition_id)

    def rows_outstanding(self) -> dict[str, int]:
        """Returns the number of rows that were written and not removed, by partition."""
        return self._rows.patiently(lambda client: client.rows_outstanding())

    # -- columns -------------------------------------------------------------------------------------------------

    def read_from_dataplane(
        self, meta: KVBatchMeta, *, select_fields: Sequence[str], pad_value_dict: Mapping[str, float] | None = None
    ) -> BatchedDataDict:
        """Returns the columns `select_fields` of the rows, padded to the same width as on the ranks. `pad_value_dict`
        has the padding values of columns for which the usual one is not wanted."""
        self._stamp_pad_seqlen(meta)
        padding = {} if pad_value_dict is None else {"pad_value_dict": pad_value_dict}
        return self._rows.patiently(lambda client: client.get_data(meta, select_fields, **padding))

    def write_to_dataplane(self, meta: KVBatchMeta, fields: Mapping[str, Any]) -> None:
        """Adds columns to the rows and records them in `meta`. Columns are [B] or [B, S]; padding is not sent."""
        look_up_lengths(self._rows, meta)
        write_columns(self._rows, meta, fields)

    def _scored_fields(self, meta: KVBatchMeta) -> tuple[str, ...]:
        """Returns the columns that the ranks fetch to compute log-probs. The column of branches is one of them if
        `meta` names it."""
        branches = [BRANCH] if BRANCH in (meta.fields or ()) else []
        return (*LP_SEED_FIELDS, *([SUPPORT] if self._config.has_supports else []), *branches)

    # -- stages --------------------------------------------------------------------------------------------------

    def get_logprobs_from_meta(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> None:
        """Adds the column `prev_logprobs` under the current weights, and records it in `meta`."""
        fields, writes = self._scored_fields(meta), {"logprobs": "prev_logprobs"}
        method = PolicyWorker.get_logprobs
        self._add_columns(meta, fields, writes, timer, method, micro_batch_size=micro_batch_size)

    def get_reference_policy_logprobs_from_meta(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> None:
        """Adds the column `reference_policy_logprobs` under the initial weights, and records it in `meta`."""
        fields, writes = self._scored_fields(meta), {"reference_logprobs": "reference_policy_logprobs"}
        method = PolicyWorker.get_reference_policy_logprobs
        self._add_columns(meta, fields, writes, timer, method, micro_batch_size=micro_batch_size)

    # -- methods that other trainers on TransferQueue call ---------------------------------------------------------

    def _stamp_pad_seqlen(self, meta: KVBatchMeta) -> None:
        """Writes into `meta` the width to which driver and ranks pad the rows, as `stamp_width` does."""
        stamp_width(self._rows, meta)

    def _packing_args(self, mb_tokens_key: str) -> tuple[SequencePackingArgs | None, DynamicBatchingArgs | None]:
        """Returns how the rows of a stage share passes, as fresh copies. Both are None in padded mode.

        `mb_tokens_key` names the stage, `logprob_mb_tokens` or `train_mb_tokens`. `learner.micro_batch_tokens` is the
        limit for both.
        """
        if mb_tokens_key not in ("logprob_mb_tokens", "train_mb_tokens"):
            raise ValueError(
                f"mb_tokens_key is {mb_tokens_key!r}; it must be one of logprob_mb_tokens, train_mb_tokens"
            )
        plan = BatchingPlan.of(self._config.learner)
        return plan.packing, plan.dynamic


_IGNORED_KEYS = (
    "storage_capacity",
    "claim_meta_poll_interval_s",
    "observability",
    "global_segment_size",
    "local_buffer_size",
)
"""Keys of a TransferQueue user's dict that have no counterpart in asyncrl."""


def data_plane_section(dp_cfg: DataPlaneSection | Mapping[str, Any]) -> DataPlaneSection:
    """Returns the section `data_plane`, from a section, from its fields, or from the dict of a TransferQueue user.

    Such a dict has these keys:

    - `impl: transfer_queue`, which is `backend` in the section;
    - `num_storage_units`, which is `transfer_queue_storage_units` in the section;
    - `enabled`, which must be true, because the rows need a data plane;
    - `backend`, the kind of storage, which must be `simple` (or equal to `impl`), because no other kind exists.

    `storage_capacity`, `claim_meta_poll_interval_s`, `observability`, and NeMo-RL's `global_segment_size` and
    `local_buffer_size` have no effect and give a warning. Raises ValueError for any other key or value.

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
