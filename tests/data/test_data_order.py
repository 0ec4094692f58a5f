"""The order of batches: pure in (seed, epoch) and in what has been read of it, the same whoever asks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vpipe.data import BatchOrder
from vpipe.errors import UserError


def listed(order: BatchOrder, epoch: int = 0, read: Any = ()) -> list[list[int]]:
    return [batch.tolist() for batch in order.batches(epoch, read)]


def test_epochs_and_seeds_differ() -> None:
    order = BatchOrder(1000, batch_size=1000, seed=1)
    others = (listed(order, 1), listed(BatchOrder(1000, batch_size=1000, seed=2)), [list(range(1000))])
    assert listed(order) not in others
    assert all(sorted(batch) == list(range(1000)) for (batch,) in (listed(order), *others))


def test_the_shuffle_is_pinned() -> None:
    """A run resumed with another release of numpy or of vpipe reads the same examples."""
    assert listed(BatchOrder(10, batch_size=10, seed=7)) == [[6, 3, 4, 9, 0, 2, 8, 7, 5, 1]]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=80),
    max_tokens=st.integers(30, 120),
    seed=st.integers(0, 99),
    epoch=st.integers(0, 3),
)
def test_batches_by_tokens_fit_and_cover(lengths: list[int], max_tokens: int, seed: int, epoch: int) -> None:
    order = BatchOrder(lengths, max_tokens=max_tokens, seed=seed)
    batches = listed(order, epoch)
    assert len(batches) == len(listed(order)), "as many in every epoch"
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) * max(lengths[i] for i in batch) <= max_tokens


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    parts=st.lists(
        st.tuples(
            st.sampled_from([("batch_size", 5), ("batch_size", 8), ("max_tokens", 30), ("max_tokens", 64)]),
            st.integers(0, 4),
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 99),
)
def test_an_epoch_that_is_read_by_changing_batches_has_each_example_once(
    lengths: list[int], parts: list[tuple[tuple[str, int], int]], seed: int
) -> None:
    """And where the batches do not change, those that are left are those that would have come."""
    seen: list[int] = []
    read: Any = ()
    for (kind, size), count in parts:
        order = BatchOrder(lengths, seed=seed, **{kind: size})  # type: ignore[arg-type]
        left = listed(order, 1, read)
        whole = [batch for batch in left if kind == "max_tokens" or len(batch) == size]
        taken = whole[:count]
        seen += itertools.chain(*taken)
        read = order.extended(read, len(taken))
        assert listed(order, 1, read) == left[len(taken) :]
    assert sorted([*seen, *itertools.chain(*listed(order, 1, read))]) == list(range(len(lengths)))


def test_groups_are_read_one_after_the_other() -> None:
    groups = [10, 20, 5]
    home = np.repeat([0, 1, 2], groups)
    order = BatchOrder(35, batch_size=35, groups=groups, seed=4)
    (first,), (second,) = listed(order), listed(order, 3)
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
        ({"examples": 4, "batch_size": 1, "seed": -1}, "seed is -1"),
    ],
)
def test_impossible_orders_say_why(arguments: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        BatchOrder(**arguments)  # type: ignore[arg-type]
