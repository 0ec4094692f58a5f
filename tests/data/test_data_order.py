"""The order of batches: pure in (seed, epoch, batch), resumable by two integers, the same whoever asks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vpipe.data import BatchOrder
from vpipe.errors import UserError

sizes = st.integers(1, 200)


@given(num=sizes, batch_size=st.integers(1, 9), num_replicas=st.integers(1, 4), seed=st.integers(0, 2**40))
def test_an_epoch_holds_each_example_once(num: int, batch_size: int, num_replicas: int, seed: int) -> None:
    orders = [
        BatchOrder(num, batch_size=batch_size, seed=seed, num_replicas=num_replicas, replica=replica, drop_last=False)
        for replica in range(num_replicas)
    ]
    seen = [i for order in orders for batch in range(len(order)) for i in order.indices(batch)]
    assert sorted(seen) == list(range(num))


@given(num=sizes, batch_size=st.integers(1, 9), num_replicas=st.integers(1, 4))
def test_full_batches_are_full_on_every_replica(num: int, batch_size: int, num_replicas: int) -> None:
    if num < batch_size * num_replicas:
        with pytest.raises(UserError, match=f"{num} examples.*{batch_size}.*{num_replicas} replicas"):
            BatchOrder(num, batch_size=batch_size, num_replicas=num_replicas)
        return
    for replica in range(num_replicas):
        order = BatchOrder(num, batch_size=batch_size, num_replicas=num_replicas, replica=replica)
        assert {len(batch) for batch in order} == {batch_size}


def test_resume_is_a_jump() -> None:
    straight = BatchOrder(50, batch_size=4, seed=3)
    epochs = [list(straight) for _ in range(3)]
    assert straight.state() == {"epoch": 3, "batch": 0}

    interrupted = BatchOrder(50, batch_size=4, seed=3)
    for number, _ in enumerate(interrupted):
        if number == 4:
            break
    state = interrupted.state()
    assert state == {"epoch": 0, "batch": 5}, "inside the loop the position is that of the next batch"
    resumed = BatchOrder(50, batch_size=4, seed=3)
    resumed.restore(state)
    assert list(resumed) == epochs[0][5:]
    assert list(resumed) == epochs[1]
    assert BatchOrder(50, batch_size=4, seed=3).indices(7, epoch=2) == epochs[2][7]


def test_epochs_and_seeds_differ() -> None:
    order = BatchOrder(1000, batch_size=1000, seed=1)
    assert order.indices(0, epoch=0) != order.indices(0, epoch=1)
    assert order.indices(0, epoch=0) != BatchOrder(1000, batch_size=1000, seed=2).indices(0)
    assert order.indices(0, epoch=0) != list(range(1000))


def test_the_shuffle_is_pinned() -> None:
    """A run resumed with another release of numpy or of vpipe reads the same examples."""
    assert BatchOrder(10, batch_size=10, seed=7).indices(0) == [6, 3, 4, 9, 0, 2, 8, 7, 5, 1]


def test_twice_the_replicas_with_half_the_batch_read_the_same() -> None:
    one = BatchOrder(64, batch_size=8, seed=5)
    two = [BatchOrder(64, batch_size=4, seed=5, num_replicas=2, replica=replica) for replica in (0, 1)]
    for batch in range(len(one)):
        assert one.indices(batch) == two[0].indices(batch) + two[1].indices(batch)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=80),
    max_tokens=st.integers(30, 120),
    seed=st.integers(0, 99),
    epoch=st.integers(0, 3),
)
def test_batches_by_tokens_fit_and_cover(lengths: list[int], max_tokens: int, seed: int, epoch: int) -> None:
    order = BatchOrder(lengths, max_tokens=max_tokens, seed=seed, epoch=epoch)
    batches = list(order)
    assert len(batches) == len(order)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) * max(lengths[i] for i in batch) <= max_tokens


def test_batches_by_tokens_are_split_over_replicas_and_capped_in_rows() -> None:
    lengths = list(range(1, 41))
    orders = [BatchOrder(lengths, max_tokens=64, batch_size=5, num_replicas=2, replica=r, seed=1) for r in (0, 1)]
    seen = [tuple(batch) for order in orders for batch in order]
    assert len(orders[0]) == len(orders[1])
    assert len(set(seen)) == len(seen)
    assert max(map(len, seen)) == 5


def test_groups_are_read_one_after_the_other() -> None:
    groups = [10, 20, 5]
    home = np.repeat([0, 1, 2], groups)
    order = BatchOrder(35, batch_size=35, groups=groups, seed=4)
    first, second = order.indices(0, epoch=0), order.indices(0, epoch=3)
    for drawn in (first, second):
        assert sorted(drawn) == list(range(35))
        assert np.count_nonzero(np.diff(home[drawn])) == 2, "each group is entered once"
    assert first != second


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"examples": 0, "batch_size": 1}, "0 examples"),
        ({"examples": 4, "batch_size": 0}, "batch_size is 0"),
        ({"examples": 4}, "batch_size or max_tokens"),
        ({"examples": 4, "max_tokens": 9}, "use batch_size"),
        ({"examples": [3, 12], "max_tokens": 9}, "example 1 has 12 tokens.*max_tokens 9"),
        ({"examples": [3], "max_tokens": 9, "num_replicas": 2}, "1 batches.*2 replicas"),
        ({"examples": 4, "batch_size": 1, "seed": -1}, "seed is -1"),
        ({"examples": 4, "batch_size": 1, "num_replicas": 2, "replica": 2}, "replica 2.*there are 2"),
        ({"examples": 4, "batch_size": 1, "batch": 4}, "batch 4 of epoch 0.*4 batches"),
    ],
)
def test_impossible_orders_say_why(arguments: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        BatchOrder(**arguments)  # type: ignore[arg-type]
