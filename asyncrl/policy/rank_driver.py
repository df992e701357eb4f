"""The driver's side of a sharded model: it cuts batches for the ranks and combines their results.

The policy and the critic share this code, which does not depend on the model. Arguments that no rank can use are
refused before any rank is called, or by all ranks together. In both cases the ranks stay usable.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from asyncrl.algorithms.interfaces import LossFunction, ValueLossFunction, input_type_of
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.sharding import DynamicBatchingArgs, SequencePackingArgs, require
from asyncrl.policy.batching import MIN_WIDTH
from asyncrl.policy.interfaces import Timer
from asyncrl.policy.rank_actor import RankKind
from asyncrl.policy.ranks import RankGroup
from asyncrl.policy.step_plan import check_columns, required_columns
from asyncrl.policy.step_report import RankRecord, step_report, train_result


class RankDriver:
    """The model at `model_path` (default: `config.model.path`) on `config.learner.ranks` ranks.

    `start`, or the first call that needs them, starts the ranks. With `weights_path`, and optionally `optimizer_path`,
    they begin with the checkpoint that `save_checkpoint` wrote there.
    """

    _kind: RankKind
    _training = "training"
    """Name of `train` for a timer. Its stages are `<name>/shard_data` and `<name>/ranks`; other calls have the same two
    stages. A timer nests them in whatever stage the caller measures."""

    def __init__(
        self,
        config: Config,
        *,
        model_path: str | None = None,
        weights_path: str | Path | None = None,
        optimizer_path: str | Path | None = None,
    ) -> None:
        if optimizer_path is not None and weights_path is None:
            raise ValueError(
                f"optimizer_path={str(optimizer_path)!r} was given without weights_path: also pass the weights_path of "
                "the same checkpoint"
            )
        self._config = config
        self._group = RankGroup(config, model_path=model_path or config.model.path, kind=self._kind)
        self._first_checkpoint = (weights_path, optimizer_path)

    def start(self) -> None:
        """Starts the ranks and loads the model. Raises the errors of `RankGroup.start` and `load_checkpoint`."""
        self._group.start()
        weights_path, optimizer_path = self._first_checkpoint
        if weights_path is not None:
            self.load_checkpoint(weights_path, optimizer_path)

    @property
    def _ranks(self) -> RankGroup:
        if not self._group.begun:
            self.start()
        return self._group

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction | ValueLossFunction,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> dict[str, Any]:
        _check_widths(data)
        rows = data.size if gbs is None else gbs
        needed = self._needed_columns(loss_fn, rows=data.size, rows_per_update=rows, eval_mode=eval_mode)
        check_columns(data, needed, reader="the loss")
        with timed(timer, f"{self._training}/shard_data"):
            shards, _ = self._cut(data, rows_per_update=rows, micro_batch_size=mbs)
        with timed(timer, f"{self._training}/ranks"):
            records = self._ranks.call_each(
                "train",
                [(shard,) for shard in shards],
                shared=[loss_fn],
                rows_per_update=self._rank_rows(rows),
                micro_batch_size=mbs,
                eval_mode=eval_mode,
            )
        return trained(records)

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        ignore_arguments("prepare_for_training", args, kwargs)
        self._ranks.call("prepare_for_training")

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        ignore_arguments("finish_training", args, kwargs)
        self._ranks.call("finish_training")

    def save_checkpoint(
        self,
        weights_path: str | Path,
        optimizer_path: str | Path | None = None,
        tokenizer_path: str | Path | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        ignore_arguments("save_checkpoint", args, kwargs)
        paths = [None if path is None else _absolute(path) for path in (optimizer_path, tokenizer_path)]
        self._ranks.call("save_checkpoint", _absolute(weights_path), *paths)

    def load_checkpoint(self, weights_path: str | Path, optimizer_path: str | Path | None = None) -> None:
        """Loads the weights that `save_checkpoint` wrote, from any number of ranks. With `optimizer_path`, also loads
        the optimizer, its position in the learning-rate schedule of `train`, and the random generators.

        Raises CheckpointError if it cannot; then nothing has changed. The reference stays the model with which the
        ranks were started.
        """
        optimizer = None if optimizer_path is None else _absolute(optimizer_path)
        self._ranks.call("load_checkpoint", _absolute(weights_path), optimizer)

    def shutdown(self) -> bool:
        return self._group.shutdown()

    def on_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls `RankGroup.on_ranks`. Other layers, such as weight publication, access the ranks' models in this
        way."""
        return self._ranks.on_ranks(function, *args)

    def beside_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls `RankGroup.beside_ranks`."""
        return self._ranks.beside_ranks(function, *args)

    def _needed_columns(
        self, loss_fn: LossFunction | ValueLossFunction, *, rows: int, rows_per_update: int, eval_mode: bool
    ) -> frozenset[str]:
        """Returns the columns that a `train` reads, as far as the loss names them. Raises TypeError for a loss that is
        not callable, and ValueError for a loss with an unknown `input_type`."""
        if not callable(loss_fn):
            raise TypeError(f"loss_fn is a {type(loss_fn).__name__}, which cannot be called; it must be a LossFunction")
        input_type_of(loss_fn)
        updates = -(-rows // max(rows_per_update, 1))
        return required_columns(loss_fn, updates=updates, eval_mode=eval_mode)

    # -- cutting -------------------------------------------------------------------------------------------------

    def _scored(
        self, method: str, data: BatchedDataDict, *, micro_batch_size: int | None, timer: Timer | None
    ) -> BatchedDataDict:
        _check_widths(data)
        check_columns(data, ("input_ids", "input_lengths"), reader=method)
        with timed(timer, f"{method}/shard_data"):
            shards, indices = self._cut(data, rows_per_update=None, micro_batch_size=micro_batch_size)
        with timed(timer, f"{method}/ranks"):
            answers = self._ranks.call_each(method, [(shard,) for shard in shards], micro_batch_size=micro_batch_size)
        scored = BatchedDataDict.from_batches(answers)
        if indices is not None:
            scored.reorder_data(indices)
        return scored

    def _cut(
        self, data: BatchedDataDict, *, rows_per_update: int | None, micro_batch_size: int | None
    ) -> tuple[Sequence[BatchedDataDict], list[int] | None]:
        """Returns one shard for each rank, and the indices that restore the order of the rows (None: order is kept)."""
        check_micro_batch_size(micro_batch_size)
        if rows_per_update == data.size and data.size % self._ranks.size:
            return data.shard_by_batch_size(self._ranks.size, allow_uneven_shards=True), None
        packing, dynamic = self._packing_args("train_mb_tokens") if micro_batch_size is None else (None, None)
        if packing is not None:
            return data.shard_by_batch_size(self._ranks.size, rows_per_update, sequence_packing_args=packing)
        if dynamic is not None:
            return data.shard_by_batch_size(self._ranks.size, rows_per_update, dynamic_batching_args=dynamic)
        return data.shard_by_batch_size(self._ranks.size, rows_per_update), None

    def _packing_args(self, mb_tokens_key: str) -> tuple[SequencePackingArgs | None, DynamicBatchingArgs | None]:
        """Returns how the rows of a stage share passes, as fresh copies. Both are None in padded mode.

        `mb_tokens_key` names the stage, `logprob_mb_tokens` or `train_mb_tokens`. `learner.micro_batch_tokens` is the
        limit for both.
        """
        if mb_tokens_key not in ("logprob_mb_tokens", "train_mb_tokens"):
            raise ValueError(
                f"mb_tokens_key is {mb_tokens_key!r}; it must be one of logprob_mb_tokens, train_mb_tokens"
            )
        learner = self._config.learner
        match learner.batching:
            case "packed":
                return (
                    SequencePackingArgs(
                        max_tokens_per_microbatch=learner.micro_batch_tokens,
                        input_key="input_ids",
                        input_lengths_key="input_lengths",
                        algorithm="modified_first_fit_decreasing",
                        sequence_length_pad_multiple=1,
                    ),
                    None,
                )
            case "dynamic":
                return None, DynamicBatchingArgs(
                    max_tokens_per_microbatch=learner.micro_batch_tokens,
                    sequence_length_round=MIN_WIDTH,
                    input_key="input_ids",
                    input_lengths_key="input_lengths",
                )
            case "padded":
                return None, None

    def _rank_rows(self, rows_per_update: int) -> int:
        return -(-rows_per_update // self._ranks.size)


def trained(records: Sequence[RankRecord]) -> dict[str, Any]:
    """Returns the result of `train` from the records of the ranks."""
    return {**train_result(records), "report": step_report(records)}


def ignore_arguments(call: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Warns about arguments that have no effect in asyncrl, by name, once for each place of call."""
    names = [*(f"positional argument {value!r}" for value in args), *kwargs]
    if names:
        warnings.warn(f"{call}() ignores {', '.join(names)}: asyncrl has no such argument; remove it", stacklevel=3)


def _absolute(path: str | Path) -> Path:
    """Returns the caller's path as an absolute path, because a rank has another working directory."""
    return Path(path).absolute()


def timed(timer: Timer | None, label: str) -> Any:
    """Returns `timer.time(label)`, or a context that does nothing if there is no timer."""
    return nullcontext() if timer is None else timer.time(label)


def check_micro_batch_size(rows: int | None) -> None:
    """Raises AssertionError for an impossible size. The check is in the driver, so that it ends no rank."""
    require(rows is None or rows > 0, f"micro_batch_size (mbs) is {rows}; it must be at least 1")


def _check_widths(data: BatchedDataDict) -> None:
    """Checks that all tensors of two or more dimensions have the same number of tokens on dimension 1."""
    widths = {
        name: column.shape[1] for name, column in data.items() if isinstance(column, torch.Tensor) and column.ndim >= 2
    }
    if len(set(widths.values())) > 1:
        raise AssertionError(
            f"tensors differ in dimension 1 (tokens): {widths}; pad them to the same width before the call"
        )
