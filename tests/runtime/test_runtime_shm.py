"""Links between ranks, through shared memory and by streams: the common suite, no room, dead peers, the same bits."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import runtime_shared_memory as alone
import runtime_transports as scenarios
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_gloo import RankFailed, World, Worlds
from runtime_models import build
from runtime_support import Case, differing, pipeline, train_rank

from programs import another_user
from vpipe.errors import UserError
from vpipe.runtime.ranks.failure import PeerLost
from vpipe.runtime.ranks.sockets import Sockets
from vpipe.runtime.transport import link, wire
from vpipe.runtime.transport.neighbours import Neighbours, _meet
from vpipe.runtime.transport.ring import ALIGN, Ring
from vpipe.runtime.transport.ring_link import RingLink
from vpipe.runtime.transport.stream_link import streamable
from vpipe.runtime.transport.wire import Envelope, MessageLayout, pack

Run = Callable[..., list[Any]]


BOTH = pytest.mark.parametrize("wanted", ["shm", "distributed"])
"""Rings, and streams."""


@pytest.fixture
def run(worlds: Worlds) -> Run:
    """Both ranks' answers to a scenario of the common suite."""
    return lambda *arguments: worlds.run(2, alone.in_shared_memory, *arguments)


def test_common_suite(run: Run) -> None:
    assert run(scenarios.order)[1] == list(range(50))
    found = run(scenarios.many_channels)[1]
    assert len(found) == 48
    assert all(values == [float(s * 10 + t)] * (k + 1) for (s, t, k, _), values in found)
    lengths = (10, 300_000, 5, 1_000_000, 0, 70_000)
    assert run(scenarios.sizes)[1] == [length + k for length in lengths for k in (2, 0, 1)]
    run(scenarios.kinds)
    assert run(scenarios.changed_afterwards)[1] == [0.0, 1000.0, 2000.0, 3000.0]
    everything = [[[0.0, 1.0], [0.0, 1.0, 2.0]]] * 2 + [[[3.0, 3.0], [3.0, 3.0]]]
    assert run(scenarios.collectives) == [everything, everything]


@pytest.mark.parametrize("sent", [Envelope(0, 0, 1, 4, 0), Envelope(7, 0, 1, 3, 0)])
def test_another_message_is_an_error_in_words(run: Run, sent: Envelope) -> None:
    said = run(scenarios.wrong_message, sent, Envelope(0, 0, 1, 3, 0))[1]
    assert f"expected {Envelope(0, 0, 1, 3, 0)}, but received {sent}" in said


@BOTH
def test_a_message_that_nobody_takes_is_an_error_in_words(wanted: str, worlds: Worlds) -> None:
    said = worlds.run(2, alone.untaken, wanted)[1]
    assert said.startswith(f"rank 0 sent {Envelope(0, 5, 6, 0, 0)}, but no action of rank 1 took it")


@pytest.mark.parametrize("piece", [40, 60, 1000])
def test_records_that_come_in_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor of a ring comes with the first byte of its record."""
    monkeypatch.setattr(link, "BUFFER", piece)
    here, there = (RingLink(peer, end, 1 << 20) for peer, end in enumerate(socket.socketpair()))
    values = [torch.arange(float(10**k)) for k in range(1, 6)]  # each needs another ring
    for k, value in enumerate(values):
        assert here.send(pack(Envelope(0, 0, 1, k, 0), (value, [value] * k)))
    while there.receive():
        pass
    for k, value in enumerate(values):
        message = there.read()
        assert message is not None
        assert message[0] == Envelope(0, 0, 1, k, 0)
        assert torch.equal(message[1][0], value)
    here.close()
    there.close()


def test_a_form_is_described_once_and_again_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, described = [1, 2, 3, 1, 3, 4, 2, 1, 5, 3, 4], []

    def read(text: bytes) -> MessageLayout:
        described.append(text)
        return wire.parsed(text)

    monkeypatch.setattr(link, "parsed", read)
    for most, expected in ((1024, 5), (3, 9)):  # counting begins again at the first 4 and at 5
        monkeypatch.setattr(link, "MOST_LAYOUTS", most)
        described.clear()
        ends = socket.socketpair()
        here, there = (RingLink(peer, end, 1 << 20) for peer, end in enumerate(ends))
        for k, length in enumerate(lengths):
            value = torch.arange(float(length)) + k
            assert here.send(pack(Envelope(0, 0, 1, k, 0), {"x": value}))
            while there.receive():
                pass
            message = there.read()
            assert message is not None
            assert message[0] == Envelope(0, 0, 1, k, 0)
            assert torch.equal(message[1]["x"], value)
        assert len(described) == expected
        here.close()
        there.close()


X = torch.zeros(2, 3)
LOOKALIKES: list[Any] = [
    (None, X), (None, X, X), (X, None), (0, X), (1, X), (True, X), (1.0, X), ("1", X), (None, X.double()), (None, X.view(3, 2)),
    (None, X.clone().requires_grad_()), (None, X.t()), (None, [X]), (None, (X,)), (None, {"x": X}), [None, X], X, None, (), (None, 1),
]  # fmt: skip


@pytest.mark.parametrize("before", range(len(LOOKALIKES)))
def test_a_message_is_described_as_if_none_had_come_before(before: int) -> None:
    for after in LOOKALIKES:
        pack(Envelope(0, 0, 1, 0, 0), LOOKALIKES[before])
        found = pack(Envelope(0, 0, 1, 1, 0), after)
        wire._latest.clear()
        alone = pack(Envelope(0, 0, 1, 1, 0), after)
        assert found.layout == alone.layout
        assert [id(tensor) for tensor in found.tensors] == [id(tensor) for tensor in alone.tensors]


@given(st.lists(st.integers(1, 2048), max_size=60), st.data())
def test_ring_never_overlaps(lengths: list[int], data: st.DataObject) -> None:
    ring, unread = Ring(4096), []
    for length in lengths:
        while (offset := ring.place(length)) is None:
            assert unread, "half a ring fits into an empty one"
            ring.free(unread.pop(0)[2])
        assert offset % ALIGN == 0
        assert offset + length <= ring.size
        assert all(offset + length <= begin or end <= offset for begin, end, _ in unread)
        unread.append((offset, offset + length, ring.head))
        for _ in range(data.draw(st.integers(0, len(unread)))):
            ring.free(unread.pop(0)[2])


@pytest.mark.parametrize(("wanted", "ring"), [("shm", 8192), ("distributed", 0)])
def test_no_room_in_both_directions(wanted: str, ring: int, worlds: Worlds) -> None:
    assert worlds.run(2, alone.everybody_to_everybody, 500, 300, 4096, wanted) == [ring, ring]


@BOTH
def test_a_neighbour_that_runs_ahead_fills_no_memory(wanted: str, worlds: Worlds) -> None:
    assert worlds.run(2, alone.running_ahead, 60, wanted)[1] <= RingLink.eager


@BOTH
def test_a_rank_that_waits_makes_room_for_what_it_waits_for(wanted: str, worlds: Worlds) -> None:
    assert worlds.run(2, alone.out_of_turn, 40, wanted)[1] == [40.0, *range(40)]


@BOTH
def test_three_ranks_all_to_all(wanted: str, worlds: Worlds) -> None:
    worlds.run(3, alone.everybody_to_everybody, 300, 1000, 16384, wanted)


@BOTH
def test_messages_larger_than_the_room(wanted: str, worlds: Worlds) -> None:
    worlds.run(2, alone.everybody_to_everybody, 6, 700_000, 4096, wanted)


def test_what_the_network_does_not_take_is_sent_by_a_thread(worlds: Worlds) -> None:
    assert worlds.run(2, alone.slow_reader, 12, 500_000)[1] == [float(k) for k in range(12)]


@pytest.mark.parametrize("rank_of_little_room", [None, 0, 1])
def test_large_messages_go_over_gloo_from_the_next_step_on(worlds: Worlds, rank_of_little_room: int | None) -> None:
    assert worlds.run(2, alone.large_ones, rank_of_little_room) == [[["stream"] * 3, ["gloo"] * 3, ["gloo"] * 3]] * 2


def test_what_goes_by_a_stream_follows_from_what_the_kernel_grants() -> None:
    assert streamable(425_984) == 512 * 1024, "what Linux grants where nobody has told it otherwise"
    assert streamable(8 * 2**20) == 2 * 2**20
    assert streamable(64 * 2**20) == 2 * 2**20


@BOTH
def test_few_numbers_are_gathered_without_torch(wanted: str, worlds: Worlds) -> None:
    numbers = [[10.0 * n, 10.0 * n + 1, 10.0 * n + 1, 10.0 * n + 2, 10.0 * n + 2, 10.0 * n + 2] for n in range(3)]
    assert (
        worlds.run(3, alone.few_numbers, wanted) == [(0, [*numbers, [1.0, 4.0, 9.0], [5000.0, 10000.0, 15000.0]])] * 3
    )


@BOTH
def test_a_rank_in_a_collective_is_not_waited_for(wanted: str, worlds: Worlds) -> None:
    assert worlds.run(2, alone.away, wanted)[1] == [float(k) for k in range(20)]


@BOTH
def test_views_whose_bytes_are_not_their_values(wanted: str, worlds: Worlds) -> None:
    assert worlds.run(2, alone.lazily_conjugated, wanted)[1] == [[1 - 2j, 3 + 4j], [-2.0, 4.0]]


@BOTH
def test_nothing_is_left_behind(wanted: str, worlds: Worlds) -> None:
    assert worlds.run(2, alone.left_behind, wanted) == [(0, 0)] * 2


@BOTH
def test_a_silent_peer_is_named_after_the_timeout(wanted: str, worlds: Worlds) -> None:
    said = worlds.run(2, alone.silent, wanted)[1]
    assert said.startswith("0: rank 1 waits for activations of step 0, microbatch 0, stage 0 → 1, but rank 0 does not")


@pytest.mark.parametrize(("sends", "with_child"), [(False, False), (True, False), (False, True)])
@BOTH
def test_a_killed_peer_is_noticed_at_once(wanted: str, sends: bool, with_child: bool) -> None:
    world = World(2)
    try:
        for pipe in world._pipes:
            pipe.send((alone.killed, (sends, with_child, wanted)))
        assert world._pipes[1].poll(60)
        good, (peer, said, seconds) = _answer(world._pipes[1])
        assert good
        assert peer == 0
        assert said.endswith("but rank 0 has closed the connection")
        assert seconds < 1.3  # it lived for 0.3 s
    finally:
        world.close()


def _answer(pipe: Any) -> Any:
    import io

    return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)


def test_choice(worlds: Worlds) -> None:
    assert worlds.run(2, alone.chosen, "auto", False) == [["RingLink"]] * 2
    assert worlds.run(2, alone.chosen, "distributed", False) == [["StreamLink"]] * 2
    assert worlds.run(2, alone.chosen, "shm", True) == [[]] * 2
    assert worlds.run(2, alone.chosen, "distributed", False, True) == [[]] * 2
    said = worlds.run(2, alone.chosen_differently, ["shm", "auto"])
    assert said == ["UserError: rank 1 has transport='auto', but rank 0 has 'shm'; give all the same"] * 2


def test_a_rank_that_cannot_listen_leaves_all_to_gloo(worlds: Worlds) -> None:
    assert worlds.run(3, alone.without_door, 1) == [[]] * 3


def test_another_users_process_is_not_let_in() -> None:
    """It has read the door's name from the system's tables, is the first to knock, and says that it is rank 1."""
    as_another = another_user()
    door = Neighbours("shm")
    door.open(2)
    script = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({door.card.name!r})"
    script += "; s.send(bytes(32) + b'\\1' + bytes(7) + bytes(32)); print('knocked', flush=True); print(len(s.recv(99)), s.recv(1))"
    with subprocess.Popen([*as_another, script], stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "knocked\n"
        rank_1 = threading.Thread(target=lambda: _meet(door._near, 1, cards, [(0, 0)], there))
        cards, there = [door.card, door.card], {}
        rank_1.start()
        here = door.of_this_machine(0, cards, patience=60.0)[1]
        rank_1.join()
        there[0, 0].sendall(b"it is me")
        assert here.recv(8) == b"it is me"
        assert stranger.stdout.readline() == "32 b''\n", "it is asked for a proof, and its connection is closed"
    door.close()


def test_machines_apart(worlds: Worlds) -> None:
    near, far = ["StreamLink", "RingLink"], ["StreamLink", "StreamLink"]
    expected = [(near, [1.0, 2.0]), (far, [0.0, 2.0]), (near[::-1], [0.0, 1.0])]
    assert worlds.run(3, alone.parted, ["a", "b", "a"]) == expected


def test_bad_choices() -> None:
    with pytest.raises(UserError, match="there is no transport 'tcp'; give one of auto, inprocess, shm, distributed"):
        pipeline(Case("gpipe", more={"transport": "tcp"}), build("plain", 4), 2)
    with pytest.raises(UserError, match="'shm' needs a process for every rank; start the script with 'vpipe run"):
        pipeline(Case("gpipe", more={"transport": "shm"}), build("plain", 4), 2)


def test_inprocess_under_a_launcher(worlds: Worlds) -> None:
    with pytest.raises(RankFailed, match="runs all ranks in one process, but a launcher has started 2"):
        worlds.run(2, train_rank, Case("gpipe", more={"transport": "inprocess"}))


BITS = [("1f1b", "plain"), ("zb-v", "skips"), ("hanayo", "plain"), ("pipedream", "plain")]


WAYS: dict[str, dict[str, Any]] = {
    "rings": {"transport": "shm"},
    "streams": {"transport": "distributed"},
    "gloo": {"transport": "distributed", "blocking": True},
}


@pytest.mark.parametrize(("schedule", "model"), BITS)
def test_the_same_bits_by_every_way(schedule: str, model: str, worlds: Worlds) -> None:
    case = Case(schedule, model, 4, 6, recompute=0.5, clip_norm=0.5, num_layers=12)
    rings, *others = [worlds.run(4, train_rank, replace(case, more=way)) for way in WAYS.values()]
    for other in others:
        for (losses, state, rows), (expected, expected_state, expected_rows) in zip(rings, other, strict=True):
            assert losses == expected
            assert not differing(state, expected_state)
            assert rows == expected_rows


def test_a_rank_that_waits_for_a_knock_can_be_freed() -> None:
    """Between two epochs: its neighbour is gone before it has knocked. (``accept`` would spin, deaf to signals.)"""
    sockets, door, found = Sockets(), Neighbours("shm"), []
    meets = threading.Event()

    def wait() -> None:
        with sockets.noting():
            door.open(2)
            meets.set()
            try:
                door.of_this_machine(0, [door.card, door.card], patience=600.0)
            except PeerLost as lost:
                found.append(str(lost))

    rank = threading.Thread(target=wait, daemon=True)
    rank.start()
    assert meets.wait(60)
    sockets.shut()
    rank.join(60)
    door.close()
    assert found == ["rank 0 has waited for rank 1, and its door was shut"]
