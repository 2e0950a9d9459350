"""The loader hands out every sample once, in a fixed order, from any position on."""

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtruntime.data import build_index
from dtruntime.data.loader import Loader
from dtruntime.data.loader_state import merge_states
from dtruntime.data.mixture import Mixture
from dtruntime.data.source import FileSource, NumberSource
from dtruntime.errors import ShardError

ORDERS = ("global", "affinity")


def numbers(batches, column="sample"):
    parts = [np.asarray(batch[column]) for batch in batches]
    return np.concatenate([np.empty(0, np.int64), *parts])


def ranks(source, world, batch=None, **options):
    return [Loader(source, batch, rank=r, world_size=world, **options) for r in range(world)]


def advance(loader, steps):
    """Take some batches and leave the rest, as an interrupted run does."""
    taken = []
    for batch in loader:
        taken.append(batch)
        if len(taken) == steps:
            break
    return taken


@pytest.fixture(scope="module")
def table_source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parquet")
    at = 0
    for number, rows in enumerate((700, 1, 1300, 555)):
        ids = np.arange(at, at + rows)
        table = pa.table({"id": ids, "half": ids / 2, "name": [f"n{i}" for i in ids]})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=100)
        at += rows
    return FileSource(build_index(folder, "parquet", use_cache=False), 100)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_arrives_once_with_its_own_columns(table_source, order, shuffle):
    seen = []
    for loader in ranks(table_source, 3, 64, order=order, shuffle=shuffle, ids=True):
        for batch in loader:
            assert np.array_equal(batch["id"], batch["__id__"])
            assert np.array_equal(batch["half"], batch["id"] / 2)
            assert [f"n{i}" for i in batch["id"]] == list(batch["name"])
            seen.append(batch["id"])
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(2556))


@given(
    total=st.integers(1, 400),
    shard=st.integers(1, 60),
    world=st.integers(1, 5),
    batch=st.integers(1, 30),
    order=st.sampled_from(ORDERS),
    last=st.sampled_from(["keep", "drop", "pad"]),
    shuffle=st.booleans(),
    window=st.integers(1, 4),
    seed=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_steps_and_samples_are_as_promised(  # noqa: PLR0913
    total, shard, world, batch, order, last, shuffle, window, seed
):
    options = dict(order=order, last=last, shuffle=shuffle, window=window, seed=seed, ids=True)
    loaders = ranks(NumberSource(total, shard), world, batch, **options)
    lengths = [len(loader) for loader in loaders]
    runs = [list(loader) for loader in loaders]
    valid = [b["__id__"][b.get("__valid__", slice(None))] for run in runs for b in run]
    delivered = np.concatenate([np.empty(0, np.int64), *valid])
    assert len(np.unique(delivered)) == len(delivered)
    if last != "drop":
        assert np.array_equal(np.sort(delivered), np.arange(total))
    if last != "keep":
        assert len({len(run) for run in runs}) == 1
        assert all(len(b["__id__"]) == batch for run in runs for b in run)
        assert [len(run) for run in runs] == lengths
    assert all(loader.epoch == 1 for loader in loaders)


@given(data=st.data(), order=st.sampled_from(ORDERS), shuffle=st.booleans())
@settings(max_examples=50, deadline=None)
def test_any_chain_of_interruptions_delivers_the_rest_once(data, order, shuffle):
    """Another world size and another batch size each time, also ranks that are not in step."""
    source = NumberSource(data.draw(st.integers(1, 500)), data.draw(st.integers(1, 40)))
    options = dict(order=order, shuffle=shuffle, window=data.draw(st.integers(1, 3)))
    state, delivered = None, []
    for _ in range(data.draw(st.integers(1, 5))):
        world, batch = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 25))
        loaders = ranks(source, world, batch, **options)
        steps = data.draw(st.integers(1, 6))
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            odd = data.draw(st.integers(0, 2)) if order == "affinity" else 0
            if loader.epoch == 0:
                delivered += advance(loader, steps + odd)
        if any(loader.epoch for loader in loaders):
            break
        state = merge_states([loader.state_dict() for loader in loaders])
    for loader in ranks(source, 2, 7, **options):
        if state is not None:
            loader.load_state_dict(state)
        if not any(x.epoch for x in loaders):
            delivered += list(loader)
    got = numbers(delivered)
    assert len(np.unique(got)) == len(got)
    if not any(loader.epoch for loader in loaders):
        assert np.array_equal(np.sort(got), np.arange(len(source)))


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_global_batches_are_the_same_at_any_world_size(data):
    source = NumberSource(data.draw(st.integers(1, 600)), 20)
    size, streams = data.draw(st.integers(4, 40)), data.draw(st.integers(1, 4))

    def run(worlds):
        """Global batches, in order; the world size changes after every few steps."""
        state, batches = None, []
        while worlds:
            world, steps = worlds.pop(0)
            loaders = ranks(source, world, global_batch_size=size, streams=streams, window=2)
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(state)
            parts = [advance(loader, steps) for loader in loaders]
            for step in range(max(len(part) for part in parts)):
                batch = numbers([part[step] for part in parts if step < len(part)])
                batches.append(sorted(batch.tolist()))
            if loaders[0].epoch:
                break
            state = loaders[0].state_dict()
        return batches

    whole = run([(1, 10**6)])
    changes = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), max_size=4))
    assert run([*changes, (data.draw(st.integers(1, 4)), 10**6)]) == whole


def test_state_is_small_whatever_the_dataset():
    source = NumberSource(10**11, 10**6)
    loader = Loader(source, 1000, prefetch_shards=0, window=1)
    advance(loader, 2)
    state = json.dumps(loader.state_dict())
    assert len(state) < 4096
    again = Loader(source, 1000, window=1)
    again.load_state_dict(json.loads(state))
    assert again.position == 2000


def test_what_was_read_ahead_is_not_consumed():
    loader = Loader(NumberSource(1000, 10), 10, transform=lambda batch: batch)
    first = advance(loader, 3)
    state = loader.state_dict()
    assert state["position"] == 30
    again = Loader(NumberSource(1000, 10), 10)
    again.load_state_dict(state)
    rest = numbers(list(again))
    assert np.array_equal(np.sort(np.append(numbers(first), rest)), np.arange(1000))


def test_leaving_and_iterating_again_goes_on():
    loader = Loader(NumberSource(100, 10), 8)
    got = numbers(advance(loader, 3) + advance(loader, 2) + list(loader))
    assert np.array_equal(np.sort(got), np.arange(100))
    assert (loader.epoch, loader.position) == (1, 0)


def test_second_resume_does_not_start_from_zero():
    source = NumberSource(100, 10)
    state, got = Loader(source, 10).state_dict(), []
    for _ in range(10):
        loader = Loader(source, 10)
        loader.load_state_dict(state)
        got += advance(loader, 1)
        state = loader.state_dict()
    assert np.array_equal(np.sort(numbers(got)), np.arange(100))


def test_state_at_the_end_of_an_epoch_gives_the_next_epoch_whole():
    source = NumberSource(40, 10)
    loader = Loader(source, 10)
    steps = iter(loader)
    for _ in range(4):
        next(steps)
    behind_the_last = loader.state_dict()
    assert next(steps, None) is None
    for state in (behind_the_last, loader.state_dict()):
        again = Loader(source, 10)
        again.load_state_dict(state)
        runs = [list(again) for _ in range(1 if state["epoch"] else 2)]
        assert len(numbers(runs[-1])) == 40
        assert again.epoch == 2


def test_epochs_differ_and_repeat():
    def epochs(seed):
        loader = Loader(NumberSource(200, 10), 16, seed=seed)
        return [numbers(loader).tolist() for _ in range(2)]

    assert epochs(1) == epochs(1)
    assert epochs(1)[0] != epochs(1)[1]
    assert epochs(1)[0] != epochs(2)[0]


def test_set_epoch_stays_within_the_epoch_that_is_read():
    loader = Loader(NumberSource(100, 10), 10)
    advance(loader, 3)
    loader.set_epoch(0)
    assert loader.position == 30
    loader.set_epoch(5)
    assert (loader.epoch, loader.position) == (5, 0)
    advance(loader, 1)
    loader.restart()
    assert (loader.epoch, loader.position) == (5, 0)


def test_affinity_keeps_each_rank_on_its_shards_in_every_epoch():
    for loader in ranks(NumberSource(1000, 10), 3, 50, order="affinity"):
        shards = [set((numbers(loader) // 10).tolist()) for _ in range(3)]
        assert shards[0] == shards[1] == shards[2]


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=6), st.data())
@settings(max_examples=50, deadline=None)
def test_skipped_samples_never_come_and_all_others_do(pairs, data):
    skip = [(min(pair), max(pair)) for pair in pairs]
    left = set(range(300)) - {i for start, stop in skip for i in range(start, stop)}
    if not left:
        with pytest.raises(ShardError, match="every sample is skipped"):
            NumberSource(300, 7, skip=skip)
        return
    source = NumberSource(300, data.draw(st.integers(1, 50)), skip=skip)
    order = data.draw(st.sampled_from(ORDERS))
    got = numbers([b for loader in ranks(source, 2, 9, order=order) for b in loader])
    assert sorted(got.tolist()) == sorted(left)


def test_state_of_other_data_or_order_is_refused():
    source = NumberSource(100, 10)
    state = Loader(source, 10).state_dict()
    for other, words in (
        (Loader(NumberSource(101, 10), 10), "other data"),
        (Loader(NumberSource(100, 20), 10), "layout"),
        (Loader(NumberSource(100, 10, skip=[(0, 5)]), 10), "layout"),
        (Loader(source, 10, seed=1), "seed: 0 in the state, 1 here"),
        (Loader(source, 10, shuffle=False), "shuffle"),
        (Loader(source, 10, order="affinity"), "order"),
        (Loader(source, 10, streams=3), "streams: 1 in the state, 3 here"),
    ):
        with pytest.raises(ShardError, match=words):
            other.load_state_dict(state)
    for junk in ({}, {**state, "version": 2}, {**state, "epoch": "x"}):
        with pytest.raises(ValueError, match="state"):
            Loader(source, 10).load_state_dict(junk)
    with pytest.raises(TypeError):
        Loader(source, 10).load_state_dict([1])  # type: ignore[arg-type]


def test_states_of_different_steps_do_not_merge():
    source = NumberSource(100, 10)
    first, second = ranks(source, 2, 10)
    advance(first, 2)
    advance(second, 1)
    with pytest.raises(ShardError, match="same step"):
        merge_states([first.state_dict(), second.state_dict()])
    with pytest.raises(ShardError, match="not those of all 2 ranks"):
        merge_states([first.state_dict()])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "batch_size"),
        (dict(batch_size=0), "batch_size"),
        (dict(batch_size=4, global_batch_size=4), "either"),
        (dict(batch_size=4, rank=1), "rank 1"),
        (dict(batch_size=4, order="sorted"), "order must be one of"),
        (dict(batch_size=4, last="trim"), "last must be one of"),
        (dict(batch_size=4, output="pandas"), "output must be one of"),
        (dict(batch_size=4, window=0), "window"),
        (dict(batch_size=4, streams=0), "streams"),
        (dict(global_batch_size=2, world_size=3), "divided"),
        (dict(batch_size=4, output="arrow", decode=print), "transform"),
    ],
)
def test_bad_arguments_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        Loader(NumberSource(10, 5), **options)


@pytest.mark.parametrize("source", [100, "train", None, [1, 2]])
def test_something_that_is_no_source_is_named(source):
    with pytest.raises(TypeError, match=rf"not {type(source).__name__}.*NumberSource"):
        Loader(source, 10)
    with pytest.raises(TypeError, match=f"'a' must be a Source, not {type(source).__name__}"):
        Mixture({"a": (source, 1.0)})
    with pytest.raises(TypeError, match="total must be an int"):
        NumberSource(2.5, 10)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["no", "", 0, 1, None])
def test_flags_are_true_or_false(table_source, value):
    for name in ("shuffle", "ids"):
        with pytest.raises(TypeError, match=f"{name} must be True or False"):
            Loader(table_source, 10, **{name: value})
    with pytest.raises(TypeError, match="exact must be True or False"):
        FileSource(table_source._rows.index, 10, exact=value)
    assert len(Loader(table_source, 2556, shuffle=np.False_))  # type: ignore[arg-type]


def test_errors_of_hooks_and_files_reach_the_loop_and_lose_nothing(table_source):
    def fail(batch):
        if 0 in batch["id"]:
            raise RuntimeError("sample 0 is bad")
        return batch

    loader = Loader(table_source, 50, shuffle=False, transform=fail)
    with pytest.raises(RuntimeError, match="sample 0"):
        list(loader)
    assert loader.position == 0


@pytest.mark.parametrize("order", ["global", "affinity"])
def test_loader_can_be_sent_to_another_process(order):
    loader = Loader(NumberSource(100, 10), 10, order=order)
    assert len(loader) == 10
    first = advance(loader, 2)
    copy = pickle.loads(pickle.dumps(loader))
    assert np.array_equal(numbers(list(copy)), numbers(list(loader)))
    assert len(numbers(first)) == 20


def test_abandoned_iterator_leaves_no_threads():
    import threading

    before = {t.ident for t in threading.enumerate()}
    loader = Loader(NumberSource(100_000, 100), 10, transform=lambda b: b, prefetch_shards=4)
    advance(loader, 2)
    loader.close()
    names = [t.name for t in threading.enumerate() if t.ident not in before]
    assert not [name for name in names if name.startswith("strata-")]


PLANS = """
import json
from dtruntime.data import Loader, Mixture, NumberSource
source = NumberSource(5000, 100)
mixture = Mixture({"a": (NumberSource(900, 50), 2), "b": (NumberSource(4000, 50), 1)})
plans = [
    Loader(source, 50, rank=1, world_size=3, seed=7),
    Loader(source, 50, rank=1, world_size=3, seed=7, order="affinity"),
    Loader(mixture, 50, rank=1, world_size=3, seed=7),
]
print(json.dumps([[b["sample"].tolist() for b in plan] for plan in plans]))
"""


def test_plans_are_the_same_in_another_process():
    def run(seed):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PLANS]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    first = run("1")
    assert first == run("2")
    assert len(json.loads(first)[0]) == 34
