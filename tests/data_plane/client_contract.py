"""The contract of every data-plane client. A test class inherits `ClientContract` and provides `connect`."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import numpy as np
import pytest
import torch

from asyncrl.data_plane.codec import encode
from asyncrl.data_plane.interfaces import PAD_SEQLEN, DataPlaneClient
from asyncrl.errors import RunError

FAR_S = 60.0
FIELDS = ["input_ids", "input_lengths", "weight_versions", "advantages", "kept", "text", "half"]
IDS = ["0.0_g0", "0.0_g1", "1.0_g0", "1.0_g1"]
LENGTHS = [3, 5, 1, 0]

Connect = Callable[[], DataPlaneClient]


def first_stage() -> dict[str, object]:
    """Returns rows as a rollout makes them, with wrong values in the padding."""
    width = 6
    ids_BS = torch.arange(4 * width).reshape(4, width)
    return {
        "input_ids": ids_BS,
        "input_lengths": torch.tensor(LENGTHS),
        "weight_versions": torch.full((4, width), 7),
        "kept": np.array([True, False, True, True]),
        "text": ["one", {"two": [2]}, "", None],
    }


def padded(column_BS: torch.Tensor, *, width: int, pad_value: float = 0) -> torch.Tensor:
    result = torch.full((len(column_BS), width), pad_value, dtype=column_BS.dtype)
    for i, length in enumerate(LENGTHS):
        result[i, :length] = column_BS[i, :length]
    return result


class ClientContract:
    """`connect` is a fixture of the subclass. Each call returns another client of the same data plane."""

    @pytest.fixture
    def client(self, connect: Connect) -> DataPlaneClient:
        return connect()

    @pytest.fixture
    def partition(self, client: DataPlaneClient) -> Iterator[str]:
        name = f"train-{uuid4().hex[:8]}"
        client.register_partition(name, FIELDS, 4, ["train", "logprob"])
        yield name
        client.clear_samples(None, name)

    def test_what_was_put_comes_back_exactly_and_padded_to_the_longest(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        stage = first_stage()
        client.put_samples(IDS, partition, fields=stage)
        batch = client.get_samples(IDS, partition, list(stage))
        assert list(batch) == list(stage)
        assert torch.equal(batch["input_ids"], padded(stage["input_ids"], width=5))  # type: ignore[arg-type]
        assert torch.equal(batch["weight_versions"], padded(torch.full((4, 6), 7), width=5, pad_value=-1))
        assert batch["input_lengths"].tolist() == LENGTHS
        assert batch["kept"].dtype == torch.bool
        assert batch["kept"].tolist() == [True, False, True, True]
        assert batch["text"] == ["one", {"two": [2]}, "", None]

    def test_rows_come_in_the_order_asked_for_across_groups_and_twice_if_asked(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        client.put_samples(IDS, partition, fields=first_stage())
        asked = [IDS[2], IDS[0], IDS[2]]
        batch = client.get_samples(asked, partition, ["input_ids", "input_lengths"])
        assert batch["input_lengths"].tolist() == [1, 3, 1]
        assert batch["input_ids"].tolist() == [[12, 0, 0], [0, 1, 2], [12, 0, 0]]

    def test_reading_is_padded_to_the_stamped_width_with_the_values_asked_for(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        meta = client.put_samples(IDS, partition, fields=first_stage())
        meta.extra_info[PAD_SEQLEN] = 8
        batch = client.get_data(meta.subset([2, 3]), ["input_ids", "weight_versions"], pad_value_dict={"input_ids": 99})
        assert batch["input_ids"].tolist() == [[12] + [99] * 7, [99] * 8]
        assert batch["weight_versions"].tolist() == [[7] + [-1] * 7, [-1] * 8]

    def test_a_row_beyond_the_stamped_width_is_refused_not_cut(self, client: DataPlaneClient, partition: str) -> None:
        meta = client.put_samples(IDS, partition, fields=first_stage())
        meta.extra_info[PAD_SEQLEN] = 4
        with pytest.raises(ValueError, match=r"5 tokens, more than the width 4"):
            client.get_data(meta)

    def test_stages_append_columns_under_the_same_keys_also_from_other_clients(
        self, client: DataPlaneClient, partition: str, connect: Connect
    ) -> None:
        client.put_samples(IDS, partition, fields=first_stage())
        advantages_BS = torch.randn(4, 6)
        later = connect()
        for rows in ([3, 0], [1, 2]):  # other groups of rows, in another order, than in the first stage
            columns = encode({"advantages": advantages_BS[rows]}, lengths=[LENGTHS[i] for i in rows])
            later.put_samples([IDS[i] for i in rows], partition, fields=columns)
        batch = client.get_samples(IDS, partition, ["input_ids", "advantages"])
        assert torch.equal(batch["advantages"], padded(advantages_BS, width=5))
        assert batch["input_ids"][1].tolist() == [6, 7, 8, 9, 10]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32])
    def test_dtypes_survive_also_those_that_numpy_lacks(
        self, client: DataPlaneClient, partition: str, dtype: torch.dtype
    ) -> None:
        half_BSD = torch.arange(24).reshape(2, 4, 3).to(dtype)
        client.put_samples(IDS[:2], partition, fields={"half": half_BSD})
        assert torch.equal(client.get_samples(IDS[:2], partition, ["half"])["half"], half_BSD)

    def test_a_put_is_what_it_was_when_its_writer_goes_on_with_the_tensor(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        put = {"advantages": torch.ones(2, 3), "kept": torch.ones(2)}
        client.put_samples(IDS[:2], partition, fields=put)
        for column in put.values():
            column.zero_()
        read = client.get_samples(IDS[:2], partition, list(put))
        for column in read.values():
            column.mul_(5)  # a reader's change must not reach the stored rows
        again = client.get_samples(IDS[:2], partition, list(put))
        assert all(column.eq(1).all() for column in again.values())

    def test_the_last_put_of_a_field_wins_for_just_the_samples_that_it_names(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        client.put_samples(IDS, partition, fields={"advantages": torch.zeros(4, 2)})
        client.put_samples([IDS[2], IDS[1]], partition, fields={"advantages": torch.tensor([[2.0, 2.0], [1.0, 1.0]])})
        assert client.get_samples(IDS, partition, ["advantages"])["advantages"][:, 0].tolist() == [0.0, 1.0, 2.0, 0.0]

    def test_a_put_repeated_after_a_lost_answer_changes_nothing_for_rows_and_claims(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        client.put_samples(IDS, partition, fields=first_stage())
        client.claim_meta(partition, "train", ["input_ids"], 4)
        client.put_samples(IDS, partition, fields=first_stage())
        assert len(client.sample_ids(partition)) == 4
        assert client.sample_ids("never registered") == []
        assert client.rows_outstanding()[partition] == 4
        assert client.check_consumption_status(partition, ["train"])
        assert client.claim_meta(partition, "train", ["input_ids"], 1, blocking=False).size == 0
        assert client.get_samples(IDS[1:2], partition, ["input_ids"])["input_ids"].tolist() == [[6, 7, 8, 9, 10]]

    def test_producing_a_field_is_the_ready_signal(self, client: DataPlaneClient, partition: str) -> None:
        client.put_samples(IDS, partition, fields=first_stage(), tags=[{"reward": float(i)} for i in range(4)])
        assert client.claim_meta(partition, "train", ["input_ids", "advantages"], 1, blocking=False).size == 0
        client.put_samples([IDS[3], IDS[1]], partition, fields={"advantages": torch.zeros(2, 6)}, tags=[{"a": 1}] * 2)
        meta = client.claim_meta(partition, "train", ["input_ids", "advantages"], 2, dp_rank=1, timeout_s=0.0)
        assert (meta.partition_id, meta.task_name, meta.sample_ids) == (partition, "train", [IDS[1], IDS[3]])
        assert (meta.fields, meta.sequence_lengths) == (["input_ids", "advantages"], [5, 0])
        assert meta.tags == [{"reward": 1.0, "a": 1}, {"reward": 3.0, "a": 1}]
        assert meta.extra_info == {"dp_rank": 1}

    def test_each_task_gets_every_row_once(self, client: DataPlaneClient, partition: str, connect: Connect) -> None:
        client.put_samples(IDS, partition, fields=first_stage())
        other = connect()
        claims = [(client, "train", 1), (other, "train", 3), (other, "logprob", 4)]
        got = {"train": [], "logprob": []}  # type: dict[str, list[str]]
        for claimer, task, size in claims:
            got[task] += claimer.claim_meta(partition, task, ["input_ids"], size, timeout_s=0.0).sample_ids
        assert got == {"train": IDS, "logprob": IDS}

    def test_ranks_that_claim_at_once_share_the_rows(self, partition: str, connect: Connect) -> None:
        clients = [connect() for _ in range(4)]
        ids = [f"{group}.0_g{i}" for group in range(8) for i in range(2)]
        start = threading.Barrier(5)

        def claim(client: DataPlaneClient) -> list[str]:
            start.wait(timeout=FAR_S)
            return client.claim_meta(partition, "train", ["kept"], 4, timeout_s=FAR_S).sample_ids

        with ThreadPoolExecutor(max_workers=4) as pool:
            claims = [pool.submit(claim, client) for client in clients]
            start.wait(timeout=FAR_S)
            for group in range(0, 16, 2):
                clients[0].put_samples(ids[group : group + 2], partition, fields={"kept": torch.ones(2)})
            claimed = [sample_id for future in claims for sample_id in future.result(timeout=FAR_S)]
        assert sorted(claimed) == sorted(ids)

    def test_a_claim_that_blocks_ends_at_its_deadline_and_takes_nothing(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        client.put_samples(IDS[:2], partition, fields={"kept": [1, 2]})
        with pytest.raises(TimeoutError, match=r"'train' waited 0\.01 s \(timeout_s\) for 3 rows.*2 are ready"):
            client.claim_meta(partition, "train", ["kept"], 3, timeout_s=0.01)
        assert client.claim_meta(partition, "train", ["kept"], 2, blocking=False).size == 2

    def test_groups_are_claimed_whole(self, client: DataPlaneClient) -> None:
        partition = f"grouped-{uuid4().hex[:8]}"
        client.register_partition(partition, ["kept"], 4, ["train"], grpo_group_size=2)
        client.put_samples([IDS[0], IDS[2], IDS[3]], partition, fields={"kept": [0, 2, 3]})
        assert client.claim_meta(partition, "train", ["kept"], 2, blocking=False).sample_ids == IDS[2:]
        assert client.claim_meta(partition, "train", ["kept"], 2, blocking=False).size == 0
        with pytest.raises(ValueError, match=r"batch of 3.*grpo_group_size, 2"):
            client.claim_meta(partition, "train", ["kept"], 3)
        client.clear_samples(None, partition)

    def test_consumption_is_complete_when_every_task_has_claimed_what_is_there(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        def consumed(*tasks: str) -> bool:
            return client.check_consumption_status(partition, tasks)

        client.put_samples(IDS[:3], partition, fields={"kept": [0, 1, 2]})
        client.claim_meta(partition, "train", ["kept"], 3)
        assert not consumed("train")  # a fourth row is expected
        client.put_samples(IDS[3:], partition, fields={"kept": [3]})
        assert not consumed("train")
        client.clear_samples(IDS[3:], partition)  # discarded rows do not count as missing
        assert consumed("train")
        assert not consumed("train", "logprob")
        client.clear_samples(None, partition)
        assert not consumed("train")  # a new round has begun

    def test_what_was_never_put_or_is_cleared_is_a_key_error_that_names_it(
        self, client: DataPlaneClient, partition: str, connect: Connect
    ) -> None:
        client.put_samples(IDS, partition, fields=first_stage())
        for ids, fields, named in (
            (["9.0_g0"], ["input_ids"], "9.0_g0"),
            ([IDS[0]], ["advantages"], "advantages"),
            ([IDS[0]], ["never_registered"], "never_registered"),
            (["9.0_g0"], [], "9.0_g0"),
        ):
            with pytest.raises(KeyError, match=named):
                client.get_samples(ids, partition, fields)
        with pytest.raises(KeyError, match="nowhere"):
            client.get_samples(IDS, "nowhere", ["input_ids"])
        connect().clear_samples([IDS[0], "9.0_g0"], partition)
        with pytest.raises(KeyError, match=IDS[0]):
            client.get_samples(IDS, partition, ["input_ids"])
        assert client.get_samples(IDS[1:], partition, ["text"])["text"] == [{"two": [2]}, "", None]
        assert client.rows_outstanding()[partition] == 3

    def test_a_cleared_id_that_is_put_again_is_a_new_row(self, client: DataPlaneClient, partition: str) -> None:
        client.put_samples(IDS, partition, fields=first_stage(), tags=[{"old": 1}] * 4)
        client.claim_meta(partition, "train", ["input_ids"], 4)
        client.clear_samples(IDS, partition)
        client.put_samples(IDS[:1], partition, fields={"kept": [5]})
        meta = client.claim_meta(partition, "train", ["kept"], 1, timeout_s=0.0)
        assert (meta.sample_ids, meta.sequence_lengths, meta.tags) == (IDS[:1], None, [{}])
        with pytest.raises(KeyError, match="input_ids"):
            client.get_samples(IDS[:1], partition, ["input_ids"])

    def test_tags_alone_make_a_row_and_are_merged(self, client: DataPlaneClient, partition: str) -> None:
        client.put_samples(IDS[:1], partition, tags=[{"a": 1, "b": 1}])
        client.put_samples(IDS[:1], partition, fields={"kept": [1]}, tags=[{"b": 2}])
        assert client.claim_meta(partition, "train", ["kept"], 1, blocking=False).tags == [{"a": 1, "b": 2}]

    def test_registering_again_adds_and_clears_nothing(self, client: DataPlaneClient, partition: str) -> None:
        client.put_samples(IDS, partition, fields=first_stage())
        client.claim_meta(partition, "train", ["input_ids"], 4)
        client.register_partition(partition, ["returns"], 2, ["train", "value"])
        client.put_samples(IDS, partition, fields={"returns": torch.zeros(4, 6)})
        assert client.claim_meta(partition, "value", ["input_ids", "returns"], 4, blocking=False).size == 4
        assert client.claim_meta(partition, "train", ["input_ids"], 1, blocking=False).size == 0

    def test_a_put_that_contradicts_itself_is_refused_as_a_whole(self, client: DataPlaneClient, partition: str) -> None:
        for ids, fields, tags, named in (
            (IDS[:2], {"kept": [1]}, None, "2 samples were given, but other numbers of rows in {'kept': 1}"),
            (IDS[:2], {"kept": [1, 2]}, [{}], "other numbers of rows in {'tags': 1}"),
            ([IDS[0], IDS[0]], {"kept": [1, 2]}, None, "0.0_g0.*more than once"),
            (IDS[:1], None, None, "neither fields nor tags"),
            (IDS[:1], {"input_ids": torch.zeros(1, 4), "input_lengths": torch.tensor([5])}, None, "5 tokens"),
            (IDS[:1], {"input_lengths": [-1]}, None, "negative length: -1"),
        ):
            with pytest.raises(ValueError, match=named):
                client.put_samples(ids, partition, fields=fields, tags=tags)
        with pytest.raises(KeyError, match="nowhere"):
            client.put_samples(IDS[:1], "nowhere", fields={"kept": [1]})
        assert client.rows_outstanding()[partition] == 0

    def test_the_fields_and_lengths_of_rows_are_known_without_fetching_them(
        self, client: DataPlaneClient, partition: str, connect: Connect
    ) -> None:
        client.put_samples(IDS[:3], partition, fields={"kept": [1, 2, 3]})
        client.put_samples(IDS[:2], partition, fields={"input_lengths": torch.tensor([4, 2]), "text": ["a", "b"]})
        other = connect()
        assert other.fields_of(IDS[:2], partition) == {"kept", "input_lengths", "text"}
        assert other.fields_of([IDS[2], IDS[0]], partition) == {"kept"}
        assert other.fields_of([], partition) == set(FIELDS)
        assert other.lengths_of([IDS[1], IDS[0]], partition) == [2, 4]
        assert other.lengths_of(IDS[:3], partition) is None
        assert other.lengths_of([], partition) == []
        client.clear_samples(IDS[:1], partition)
        for ask in (other.fields_of, other.lengths_of):
            with pytest.raises(KeyError, match=IDS[0]):
                ask(IDS[:2], partition)
            with pytest.raises(KeyError, match="nowhere"):
                ask([], "nowhere")

    def test_the_first_put_of_a_field_registers_it(
        self, client: DataPlaneClient, partition: str, connect: Connect
    ) -> None:
        meta = client.put_samples(IDS, partition, fields={**first_stage(), "entropy": torch.ones(4, 6)})
        assert "entropy" in (meta.fields or [])
        other = connect()
        assert other.fields_of([], partition) == {*FIELDS, "entropy"}
        assert other.fields_of(IDS, partition) == {*first_stage(), "entropy"}
        claimed = other.claim_meta(partition, "train", ["entropy"], 4, blocking=False)
        assert torch.equal(other.get_data(claimed)["entropy"], padded(torch.ones(4, 6), width=5))

    def test_a_claim_waits_for_a_field_that_is_not_registered_yet(
        self, client: DataPlaneClient, partition: str, connect: Connect
    ) -> None:
        client.put_samples(IDS, partition, fields={"kept": [0, 1, 2, 3]})
        assert client.claim_meta(partition, "train", ["entropy"], 1, blocking=False).size == 0
        with pytest.raises(
            TimeoutError, match=r"0 are ready; the columns \['entropy'\] were neither registered nor put"
        ):
            client.claim_meta(partition, "train", ["kept", "entropy"], 1, timeout_s=0.01)
        other = connect()
        with ThreadPoolExecutor(max_workers=1) as pool:
            waiting = pool.submit(other.claim_meta, partition, "train", ["kept", "entropy"], 2, timeout_s=FAR_S)
            client.put_samples(IDS[2:], partition, fields={"entropy": [0.5, 0.7]})
            assert waiting.result(timeout=FAR_S).sample_ids == IDS[2:]

    def test_the_meta_of_a_put_has_the_lengths_that_are_known(self, client: DataPlaneClient, partition: str) -> None:
        client.put_samples(IDS[:2], partition, fields={"input_lengths": torch.tensor(LENGTHS[:2])})
        later = client.put_samples([IDS[1], IDS[0]], partition, fields={"kept": [1, 2]})
        assert later.sequence_lengths == [5, 3]
        assert client.put_samples(IDS[:2], partition, tags=[{}, {}]).sequence_lengths == [3, 5]
        assert client.put_samples(IDS, partition, fields={"kept": [1, 2, 3, 4]}).sequence_lengths is None

    def test_columns_of_different_puts_end_where_the_lengths_of_the_rows_say_also_if_those_come_last(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        ids_BS, values_BS = torch.arange(24).reshape(4, 6), torch.rand(4, 9)
        meta = client.put_samples(IDS, partition, fields={"input_ids": ids_BS})
        assert torch.equal(client.get_data(meta)["input_ids"], ids_BS)  # the padding is not known yet
        client.put_samples(IDS, partition, fields={"input_lengths": LENGTHS})
        meta = client.put_samples(IDS, partition, fields={"values": values_BS})  # wider, and put without lengths
        fields = ["input_ids", "values", "input_lengths"]
        for width in (5, 8):
            meta.extra_info[PAD_SEQLEN] = width
            batch = client.get_data(meta, fields)
            assert torch.equal(batch["input_ids"], padded(ids_BS, width=width))
            assert torch.equal(batch["values"], padded(values_BS, width=width))
        batch = client.get_samples(IDS[2:], partition, fields)
        assert batch["values"].tolist() == [[values_BS[2, 0].item()], [0.0]]

    def test_claims_of_unknown_tasks_are_refused_at_once(self, client: DataPlaneClient, partition: str) -> None:
        with pytest.raises(ValueError, match=r"'trian'.*'logprob', 'train'"):
            client.claim_meta(partition, "trian", ["kept"], 1)
        with pytest.raises(ValueError, match="batch of 0"):
            client.claim_meta(partition, "train", ["kept"], 0)

    def test_reading_rows_of_which_no_field_is_named_is_refused(self, client: DataPlaneClient, partition: str) -> None:
        meta = client.put_samples(IDS, partition, fields=first_stage())
        assert list(client.get_data(meta)) == meta.fields
        meta.fields = None
        with pytest.raises(ValueError, match="neither select_fields nor the meta's fields"):
            client.get_data(meta)

    def test_an_empty_meta_reads_as_an_empty_batch(self, client: DataPlaneClient, partition: str) -> None:
        meta = client.claim_meta(partition, "train", ["input_ids", "text"], 1, blocking=False)
        batch = client.get_data(meta)
        assert (list(batch), batch.size) == (["input_ids", "text"], 0)

    def test_closing_is_idempotent_and_final(self, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
        client = connect()
        name = f"train-{uuid4().hex[:8]}"
        client.register_partition(name, FIELDS, 4, ["train"])
        client.put_samples(IDS[:1], name, fields={"kept": torch.ones(1)})
        client.clear_samples(None, name)
        client.close()
        client.close()
        with pytest.raises(RunError, match="closed"):
            client.rows_outstanding()
        monkeypatch.setattr(client, "_store", None)  # must not be called
        with pytest.raises(RunError, match="closed"):
            client.put_samples(IDS[:1], name, fields={"kept": torch.ones(1)})
