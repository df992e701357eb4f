"""The index of the data plane behaves like a model of plain sets, over random histories."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.data_plane.partitions import Partitions, Places, StoredAt
from asyncrl.data_plane.sample_ids import group_of

FIELDS = ("rollout", "advantages", "logprobs")
TASKS = ("train", "score")
GROUP_SIZE = 2
IDS = [f"{group}.0_g{i}" for group in range(4) for i in range(GROUP_SIZE)]

some_ids = st.lists(st.sampled_from(IDS), unique=True)
some_fields = st.lists(st.sampled_from(FIELDS), unique=True)


class Histories(RuleBasedStateMachine):
    """`fields` and `claimed` are the model. A put makes one object, or one for each group. `kept` are the objects, as
    (store, key), that the index has not reported as unused."""

    grouped = False

    def __init__(self) -> None:
        super().__init__()
        self.books = Partitions()
        self.fields: dict[str, dict[str, StoredAt]] = {}
        self.kept: set[tuple[str, str]] = set()
        self.stores: set[str] = set()
        self.claimed: dict[str, set[str]] = {"train": set()}
        self.ever = 0
        self.puts = 0
        self.num_samples = 4
        self.register()

    def register(self) -> None:
        self.books.register("p", FIELDS, self.num_samples, list(self.claimed), GROUP_SIZE if self.grouped else None)

    @rule(num_samples=st.integers(1, 6), task=st.sampled_from(TASKS))
    def register_again(self, num_samples: int, task: str) -> None:
        self.num_samples = num_samples
        self.claimed.setdefault(task, set())
        self.register()

    @rule(ids=some_ids, fields=some_fields, whole=st.booleans(), store=st.sampled_from(["rows-a", "rows-b", ""]))
    def put(self, ids: list[str], fields: list[str], whole: bool, store: str) -> None:
        self.puts += 1
        keys = [f"p/{'rows' if whole else group_of(sample_id)}/{self.puts}" for sample_id in ids]
        where = [StoredAt(store, key, row) for row, key in enumerate(keys)]
        if store and fields and ids:
            self.stores.add(store)
            self.kept.update((store, key) for key in keys)
        for _ in range(2):  # a put whose answer was lost is repeated, and changes nothing
            self.books.produce("p", ids, fields=fields, where=where)
        for sample_id, place in zip(ids, where, strict=True):
            self.ever += sample_id not in self.fields
            self.fields.setdefault(sample_id, {}).update(dict.fromkeys(fields, place))

    def ready(self, task: str, fields: list[str]) -> list[str]:
        """Returns the rows that may be claimed, in their order; only whole groups if rows are grouped."""
        free = [i for i, row in self.fields.items() if i not in self.claimed[task] and set(fields) <= set(row)]
        if not self.grouped:
            return free
        return [i for i in free if sum(group_of(other) == group_of(i) for other in free) == GROUP_SIZE]

    @rule(data=st.data(), fields=some_fields, units=st.integers(1, 3))
    def claim(self, data: st.DataObject, fields: list[str], units: int) -> None:
        task = data.draw(st.sampled_from(sorted(self.claimed)))
        size = units * (GROUP_SIZE if self.grouped else 1)
        ready = self.ready(task, fields)
        assert self.books.ready("p", task, fields=fields) == len(ready)
        assert self.books.claim("p", task, fields=[*fields, "never put"], batch_size=size) is None
        claim = self.books.claim("p", task, fields=fields, batch_size=size)
        if len(ready) < size:
            assert claim is None
            return
        assert claim is not None
        assert len(claim.sample_ids) == len(set(claim.sample_ids)) == size
        assert set(claim.sample_ids) <= set(ready)
        if not self.grouped:
            assert claim.sample_ids == ready[:size]
        else:
            groups = [group_of(sample_id) for sample_id in claim.sample_ids]
            assert all(groups.count(group) == GROUP_SIZE for group in groups)
        self.claimed[task] |= set(claim.sample_ids)

    @rule(ids=some_ids)
    def clear(self, ids: list[str]) -> None:
        self.check_cleared(ids, self.books.clear("p", ids))

    @precondition(lambda self: self.puts > 3)
    @rule()
    def clear_everything(self) -> None:
        self.check_cleared(list(self.fields), self.books.clear("p", None))
        self.ever = 0
        assert self.drop_unused() == self.stores, "a store must also drop the objects that were never produced"

    def check_cleared(self, ids: list[str], removed: list[str]) -> None:
        assert sorted(removed) == sorted(i for i in ids if self.fields.get(i))
        for sample_id in ids:
            self.fields.pop(sample_id, None)
        for claimed in self.claimed.values():
            claimed.difference_update(ids)

    def drop_unused(self) -> set[str]:
        """Removes the unused objects from `kept`. Returns the stores that are to drop the whole partition."""
        unused = [(store, key) for store, keys in self.books.take_unused().items() for key in keys]
        for store, key in unused:
            if key != "p/":
                self.kept.remove((store, key))  # raises KeyError for an object that was reported twice
        return {store for store, key in unused if key == "p/"}

    @invariant()
    def exactly_the_objects_without_rows_are_unused(self) -> None:
        assert not self.drop_unused()
        places = [place for row in self.fields.values() for place in row.values()]
        assert self.kept == {(place.store, place.key) for place in places if place.store}

    @invariant()
    def the_books_say_what_the_model_says(self) -> None:
        assert self.books.rows_outstanding() == {"p": len(self.fields)}
        for name in FIELDS:
            having = [i for i, row in self.fields.items() if name in row]
            places = self.books.locate("p", having, fields=[name]).places
            assert {name: stored(places[name])} == {name: [self.fields[i][name] for i in having]}
        for task, claimed in self.claimed.items():
            assert self.books.consumed("p", [task]) == (claimed >= set(self.fields) and self.ever >= self.num_samples)

    @invariant()
    def what_is_not_there_is_a_key_error(self) -> None:
        for sample_id in IDS:
            for name in FIELDS:
                if name not in self.fields.get(sample_id, {}):
                    with pytest.raises(KeyError, match=sample_id):
                        self.books.locate("p", [sample_id], fields=[name])


def stored(places: Places) -> list[StoredAt]:
    found = {
        sample: StoredAt(*address, row)
        for address, rows in places.items()
        for sample, row in zip(rows.samples, rows.rows, strict=True)
    }
    return [found[sample] for sample in range(len(found))]


class GroupedHistories(Histories):
    grouped = True


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestGroupedHistories = GroupedHistories.TestCase
TestGroupedHistories.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


def test_samples_without_a_group_in_their_name_are_groups_of_their_own() -> None:
    assert [group_of(i) for i in ("7.0_g12", "val_3", "a_g1_gx", "_g1")] == ["7.0", "val_3", "a_g1_gx", "_g1"]


def test_a_group_is_handed_out_once_even_with_more_members_than_its_size() -> None:
    books = Partitions()
    books.register("p", ["x"], 3, ["t"], 2)
    books.produce(
        "p", ["0.0_g0", "0.0_g1", "0.0_g2"], fields=["x"], where=[StoredAt("rows-a", "k", i) for i in range(3)]
    )
    claim = books.claim("p", "t", fields=["x"], batch_size=2)
    assert claim is not None
    assert claim.sample_ids == ["0.0_g0", "0.0_g1"]
    assert books.claim("p", "t", fields=["x"], batch_size=2) is None


def test_fields_that_were_put_together_share_their_places_and_each_object_is_named_once() -> None:
    books = Partitions()
    books.register("p", ["x", "y", "z"], 3, [])
    first = [StoredAt("rows-a", "k", 0), StoredAt("rows-a", "k", 1), StoredAt("rows-b", "l", 0)]
    books.produce("p", ["a", "b", "c"], fields=["x", "y"], where=first)
    books.produce("p", ["a", "b", "c"], fields=["z"], where=[StoredAt("rows-a", "m", row) for row in (2, 1, 0)])
    places = books.locate("p", ["c", "a", "b"], fields=["x", "z", "y"]).places
    assert places["x"] is places["y"]
    assert places["x"] == {("rows-b", "l"): ([0], [0]), ("rows-a", "k"): ([1, 2], [0, 1])}
    assert places["z"] == {("rows-a", "m"): ([0, 1, 2], [0, 2, 1])}
