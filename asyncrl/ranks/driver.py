"""The driver's side of a sharded model: it cuts the rows for the ranks and combines their results.

A driver has a `RankGroup`, and may have access to a data plane. Either the caller passes the rows of a call
(`RowsInHand`), or a meta names rows on the data plane (`NamedRows`): then the driver handles only their names, and the
ranks fetch and write them. The policy and the critic share this code, which does not depend on the model. Arguments
that no rank can use are refused before any rank is called, or by all ranks together. In both cases the ranks stay
usable.
"""

import shutil
import uuid
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch

from asyncrl.algorithms.interfaces import LossFunction, ValueLossFunction, input_type_of
from asyncrl.algorithms.token_estimators import TokenEstimator
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.data_plane.rows import Rows
from asyncrl.errors import CheckpointError
from asyncrl.ranks.actor import SAVING
from asyncrl.ranks.group import RankGroup, WorkerT
from asyncrl.ranks.named_rows import NamedRows, name_fields
from asyncrl.ranks.plan import BatchingPlan, check_columns, required_columns
from asyncrl.ranks.report import step_report, train_result
from asyncrl.ranks.timer import Timer, timed
from asyncrl.ranks.worker import SCORED_COLUMNS
from asyncrl.witness.judge import Request

P = ParamSpec("P")
R = TypeVar("R")


class RowsInHand:
    """The rows that a caller passes to one call, and that the driver sends to the ranks. Raises AssertionError if
    tensors of two or more dimensions differ in dimension 1. `reader` names in messages the function that reads
    the rows."""

    step = None
    writes: Mapping[str, str] = {}

    def __init__(self, data: BatchedDataDict, *, reader: str) -> None:
        _check_widths(data)
        self.size = data.size
        self._data = data
        self._reader = reader
        self._order: list[int] | None = None

    def require(self, needed: Collection[str]) -> None:
        """Raises MissingColumns, with the reader's name, if a column is missing."""
        check_columns(self._data, needed, reader=self._reader)

    def cut(self, plan: BatchingPlan, *, ranks: int, rows_per_update: int | None) -> Sequence[BatchedDataDict]:
        """Returns one shard of the rows for each rank, and remembers their order for `joined`."""
        shards, self._order = plan.cut(self._data, ranks=ranks, rows_per_update=rows_per_update)
        return shards

    def joined(self, parts: Sequence[BatchedDataDict]) -> BatchedDataDict:
        """Returns the ranks' results for their shards, in the order of the rows."""
        whole = BatchedDataDict.from_batches(parts)
        if self._order is not None:
            whole.reorder_data(self._order)
        return whole


class RankDriver(Generic[WorkerT]):
    """Operates the model at `model_path` (default: `config.model.path`) on `config.learner.ranks` ranks.

    `start`, or the first call that needs them, starts the ranks. With `weights_path`, and optionally `optimizer_path`,
    they begin with the checkpoint that `save_checkpoint` wrote there. The calls `*_from_meta`, whose `meta` names rows
    on a data plane, need `rows`, the access to it. `make_ranks` makes the `RankGroup`.
    """

    _worker: type[WorkerT]
    _training: str
    """Name of the stage under which a timer measures the parts of `train`."""
    _advantages: Sequence[str]
    """The columns that `get_advantages_from_meta` adds."""
    _trained_fields: Sequence[str]
    """The columns that `train_from_meta` fetches if the rows have them, beside those that the loss reads."""

    def __init__(
        self,
        config: Config,
        model_path: str | None = None,
        *,
        weights_path: str | Path | None = None,
        optimizer_path: str | Path | None = None,
        rows: Rows | None = None,
        make_ranks: Callable[..., RankGroup[WorkerT]] = RankGroup,
    ) -> None:
        if optimizer_path is not None and weights_path is None:
            raise ValueError(
                f"optimizer_path={str(optimizer_path)!r} was given without weights_path: also pass the weights_path of "
                "the same checkpoint"
            )
        self._config = config
        self._group = make_ranks(
            self._worker, config, model_path=model_path or config.model.path, named_rows=rows is not None
        )
        self._first_checkpoint = (weights_path, optimizer_path)
        self._rows_if_any = rows

    def start(self) -> None:
        """Starts the ranks, and loads the model and, if the constructor got its path, a checkpoint. Raises the errors
        of `RankGroup.start` and `load_checkpoint`."""
        self._group.start()
        weights_path, optimizer_path = self._first_checkpoint
        if weights_path is not None:
            self.load_checkpoint(weights_path, optimizer_path)

    @property
    def ranks(self) -> RankGroup[WorkerT]:
        """The ranks. The first use starts them."""
        if not self._group.begun:
            self.start()
        return self._group

    @property
    def _rows(self) -> Rows:
        if self._rows_if_any is None:
            raise TypeError(
                f"this {type(self).__name__} has no data plane, so a meta cannot name its rows; use TQPolicy or TQValue"
            )
        return self._rows_if_any

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
        return self._train(RowsInHand(data, reader="the loss"), loss_fn, eval_mode, gbs, mbs, timer)

    def train_from_meta(
        self,
        meta: KVBatchMeta,
        loss_fn: LossFunction | ValueLossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
        *,
        witness: Request | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Trains like `train`, on the rows' training columns and the fields that `meta` names, with the same result. It
        clears no rows. With `witness`, the rows whose column `witness` is not −1 are computed a second time, and the
        report has the findings.

        Raises MissingColumns, before any rank is called, if the rows lack a column that the loss reads or that `meta`
        names. If `extra_info["step"]` is set to the version of the weights, the age of every trained token is checked
        against its row's `tags["max_staleness_versions"]`. A token beyond it is masked in rows with the tag
        `masks_stale_tokens`, and raises StalenessViolation in other rows.
        """
        ignore_arguments("train_from_meta", (), kwargs)
        rows = NamedRows(meta, self._rows, self._trained_fields)
        return self._train(rows, loss_fn, eval_mode, gbs, mbs, timer, witness)

    def get_advantages_from_meta(
        self, meta: KVBatchMeta, estimator: TokenEstimator, timer: Timer | None = None
    ) -> None:
        """Adds the column `advantages` [B, S], whitened over the trained tokens of these rows as `estimator.whitening`
        says, and records it in `meta`. A critic also adds `returns`. A policy takes an estimator without a critic, such
        as `DiscountedReturns`.

        The rows must have the columns `estimator.reads`. Raises CallRefused if a number is not finite or if `estimator`
        fails. Raises MissingColumns if a column is missing.
        """
        writes = {name: name for name in self._advantages}
        self._add_columns(meta, estimator.reads, writes, timer, self._worker.get_advantages, estimator)

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        ignore_arguments("prepare_for_training", args, kwargs)
        self.ranks.call(self._worker.prepare_for_training)

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        ignore_arguments("finish_training", args, kwargs)
        self.ranks.call(self._worker.finish_training)

    def finish_inference(self, *args: Any, **kwargs: Any) -> None:
        """Frees the gradients of earlier training. Scoring itself leaves no state that could be freed."""
        ignore_arguments("finish_inference", args, kwargs)
        self.ranks.call(self._worker.finish_training)

    def save_checkpoint(
        self,
        weights_path: str | Path,
        optimizer_path: str | Path | None = None,
        tokenizer_path: str | Path | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        ignore_arguments("save_checkpoint", args, kwargs)
        optimizer, tokenizer = (None if path is None else _absolute(path) for path in (optimizer_path, tokenizer_path))
        weights = _absolute(weights_path)
        self.ranks.call(self._worker.stage_checkpoint, optimizer is not None)
        self.ranks.beside(SAVING, self._worker.write_checkpoint, weights, optimizer, tokenizer)

    def check_folder(self, folder: Path) -> None:
        """Raises CheckpointError unless this process can make a folder in `folder`, all ranks can write a file into it,
        and this process sees these files. Removes the folder afterwards."""
        probe = _absolute(folder) / f"probe-{uuid.uuid4().hex}"
        try:
            probe.mkdir(parents=True)
            self.ranks.call(self._worker.write_probe, probe)
            found = {path.name for path in probe.iterdir()}
            if missing := sorted({str(rank) for rank in range(self.ranks.size)} - found):
                raise CheckpointError(
                    f"this process does not see the files that ranks {', '.join(missing)} wrote there"
                )
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"checkpoints cannot be written to {folder}: {error}. Set run.dir to a folder that the learner's "
                "process and all ranks share and may write to"
            ) from error
        finally:
            shutil.rmtree(probe, ignore_errors=True)

    def stage_checkpoint(self) -> None:
        """Copies weights and optimizer on the ranks, for `write_checkpoint`. Call it between two steps. Raises
        CheckpointError if the last copies are still being written, if there is no memory for new ones, or if the
        optimizer's state has other names or numbers on another rank."""
        self.ranks.call(self._worker.stage_checkpoint)

    def write_checkpoint(self, weights_path: str | Path, optimizer_path: str | Path) -> None:
        """Writes the weights and the optimizer that `stage_checkpoint` copied, to the same files as `save_checkpoint`.
        It blocks for at most `checkpoint.timeout_s`, but another thread may make other calls meanwhile. Raises
        CheckpointError if they cannot be written in this time; no rank ends."""
        paths = _absolute(weights_path), _absolute(optimizer_path)
        self.ranks.beside(SAVING, self._worker.write_checkpoint, *paths)

    def load_checkpoint(self, weights_path: str | Path, optimizer_path: str | Path | None = None) -> None:
        """Loads the weights that `save_checkpoint` wrote on any number of ranks. With `optimizer_path`, also loads
        the optimizer, its position in the learning-rate schedule of `train`, and the random generators.

        Raises CheckpointError if the checkpoint cannot be loaded; then nothing has changed. The reference policy stays
        the model with which the ranks were started.
        """
        optimizer = None if optimizer_path is None else _absolute(optimizer_path)
        self.ranks.call(self._worker.load_checkpoint, _absolute(weights_path), optimizer)

    def shutdown(self, *, keep: bool = False) -> bool:
        """Closes the access to rows, and ends the ranks. With `keep`, processes of ranks that close without an error
        stay for the next run. Returns True if all ranks closed in time and without an error."""
        if self._rows_if_any is not None:
            self._rows_if_any.close()
        return self._group.shutdown(keep=keep)

    # -- passes over rows ----------------------------------------------------------------------------------------

    def _train(
        self,
        rows: RowsInHand | NamedRows,
        loss_fn: LossFunction | ValueLossFunction,
        eval_mode: bool,
        gbs: int | None,
        mbs: int | None,
        timer: Timer | None,
        witness: Request | None = None,
    ) -> dict[str, Any]:
        """Trains on the rows. Raises TypeError for a loss that is not callable, and ValueError for a loss with an
        unknown `input_type`."""
        if not callable(loss_fn):
            raise TypeError(f"loss_fn is a {type(loss_fn).__name__}, which cannot be called; it must be a LossFunction")
        input_type_of(loss_fn)
        per_update = rows.size if gbs is None else gbs
        updates = -(-rows.size // max(per_update, 1))
        rows.require(required_columns(loss_fn, updates=updates, eval_mode=eval_mode))
        records = self._pass(
            rows,
            self._training,
            timer,
            per_update,
            self._worker.train,
            loss_fn,
            rows_per_update=-(-per_update // self.ranks.size),
            micro_batch_size=mbs,
            eval_mode=eval_mode,
            step=rows.step,
            witness=witness,
        )
        return {**train_result(records), "report": step_report(records)}

    def _score(
        self,
        data: BatchedDataDict,
        timer: Timer | None,
        method: Callable[Concatenate[WorkerT, BatchedDataDict, P], BatchedDataDict],
        *args: P.args,
        **options: P.kwargs,
    ) -> BatchedDataDict:
        """Runs a scoring method of the worker on every rank's rows. Returns the columns that the method computes, in
        the order of the rows. A timer measures the parts of the call under the method's name."""
        rows = RowsInHand(data, reader=method.__name__)
        rows.require(SCORED_COLUMNS)
        return rows.joined(self._pass(rows, method.__name__, timer, None, method, *args, **options))

    def _add_columns(
        self,
        meta: KVBatchMeta,
        fields: Sequence[str],
        writes: Mapping[str, str],
        timer: Timer | None,
        method: Callable[Concatenate[WorkerT, BatchedDataDict, P], BatchedDataDict],
        *args: P.args,
        **options: P.kwargs,
    ) -> None:
        """Makes the ranks fetch `fields` of the rows, and write the columns that a worker's method computes from them.
        `writes` maps these columns to their names on the data plane, which are then recorded in `meta`. A timer
        measures the parts of the call under the method's name."""
        rows = NamedRows(meta, self._rows, fields, writes=writes)
        self._pass(rows, method.__name__, timer, None, method, *args, **options)
        name_fields(meta, writes.values())

    def _pass(
        self,
        rows: RowsInHand | NamedRows,
        stage: str,
        timer: Timer | None,
        per_update: int | None,
        method: Callable[Concatenate[WorkerT, BatchedDataDict, P], R],
        *shared: P.args,
        **options: P.kwargs,
    ) -> list[R]:
        """Runs a method of the worker on every rank's rows. Returns the results in rank order.

        A timer measures the parts `<stage>/shard_data` and `<stage>/ranks`, below the stage that the caller measures.
        `per_update` rows are one update; None if the call has no updates. If the options have a `micro_batch_size`,
        that number of rows of a rank shares a pass.
        """
        settings: Mapping[str, Any] = options
        with timed(timer, f"{stage}/shard_data"):
            plan = BatchingPlan.of(self._config.learner, micro_batch_size=settings.get("micro_batch_size"))
            shards = rows.cut(plan, ranks=self.ranks.size, rows_per_update=per_update)
        with timed(timer, f"{stage}/ranks"):
            return self.ranks.call_with_rows(method, shards, rows.writes, *shared, **options)


def ignore_arguments(call: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Warns about arguments that have no effect in asyncrl, once for each line that makes the call. The warning has the
    names of the keywords `kwargs`, and the values of the positional arguments `args`."""
    names = [*(f"positional argument {value!r}" for value in args), *kwargs]
    if names:
        warnings.warn(f"{call}() ignores {', '.join(names)}: asyncrl has no such argument; remove it", stacklevel=3)


def _absolute(path: str | Path) -> Path:
    """Returns the caller's path as an absolute path, because a rank has another working directory."""
    return Path(path).absolute()


def _check_widths(data: BatchedDataDict) -> None:
    """Raises AssertionError unless all tensors of two or more dimensions have the same number of tokens on
    dimension 1."""
    widths = {
        name: column.shape[1] for name, column in data.items() if isinstance(column, torch.Tensor) and column.ndim >= 2
    }
    if len(set(widths.values())) > 1:
        raise AssertionError(
            f"tensors differ in dimension 1 (tokens): {widths}; pad them to the same width before the call"
        )
