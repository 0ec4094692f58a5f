"""What a lowered program computes, found by running it on symbols: the judge of the mutation test.

Written without ``semantics``, ``timeline`` or ``verify``, so that it cannot share their mistakes. Ranks run their rows
with plain blocking sends: a SEND ends when its receiver has posted the receive; RECV only posts; F, B and I wait for
what they read. Between two ranks messages are matched by order alone, as NCCL does; only a tensor that skips stages has
a queue of its own.

Values are interned: equal numbers mean equal expressions. The meaning of a program is, for every stage, the chain of
its updates (which gradients, of which forwards, on which weights, added in which order), what was left over, and the
order in which its forwards advanced the stage's buffers. The order of sums and buffers is the author's: it belongs to
the meaning only where a stage updates several times. A program that hangs or uses what does not exist has none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

from vpipe.schedule.action import Action, Kind
from vpipe.schedule.program import Program, Versions

Place = tuple[int, int]
"""(stage, microbatch)"""


class Wrong(Exception):
    """The program cannot be executed."""


Known = dict[Hashable, int]


def meaning(program: Program, known: Known) -> Hashable:
    """Equal for programs that train alike (judged with the same ``known``); ``Wrong`` where it cannot run."""
    return _Machine(program, known).run()


class _Machine:
    def __init__(self, program: Program, known: Known) -> None:
        self.program, self.known = program, known
        steps = [[stage for stage, kind, _ in row if kind is Kind.STEP] for row in program.rows]
        self.ordered = any(len(stages) > len(set(stages)) for stages in steps)
        self.ranks = [_Rank(self, rank) for rank in range(program.num_ranks)]
        self.posted: dict[tuple[int, ...], list[tuple[Action, int]]] = defaultdict(list)
        """(source, target[, writer, reader of a skip]) → receives posted and not yet matched: (receive, writer)."""
        self.read_at_first_stage: dict[int, int] = {}
        """Vertical sync: the version that a unit read at stage 0."""
        self.meetings: dict[tuple[int, int], dict[int, tuple[tuple[int, int], ...]]] = defaultdict(dict)
        """(stage, round) → rank → the gradients with which it waits for the other replicas."""

        self.agreeing: set[int] = set()

    def intern(self, *expression: Hashable) -> int:
        return self.known.setdefault(expression, len(self.known))

    def holder(self, place: Place) -> int:
        stage, microbatch = place
        if not 0 <= stage < self.program.num_stages or not 0 <= microbatch < self.program.num_microbatches:
            raise Wrong(f"no such place {place}")
        ranks = self.program.placement.ranks_of[stage]
        return ranks[microbatch % len(ranks)]

    def run(self) -> Hashable:
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                moved |= rank.advance()
        if any(not rank.ended for rank in self.ranks) or any(self.posted.values()):
            raise Wrong("hangs")
        return tuple(rank.result() for rank in self.ranks)


class _Rank:
    def __init__(self, machine: _Machine, rank: int) -> None:
        self.machine, self.program, self.rank = machine, machine.program, rank
        self.row = self.program.rows[rank]
        self.running: Iterator[None] | None = None
        self.position = 0
        self.outputs: dict[Place, int] = {}
        self.input_grads: dict[Place, int] = {}
        self.inbox: dict[tuple[Kind, int, int, int], int | None] = {}
        """(kind of receive, stage, writer, microbatch) → the value; None while it has not come."""
        self.saved: dict[Place, int] = {}
        self.state: dict[Place, set[str]] = defaultdict(set)
        self.deferred: dict[Place, int] = {}
        self.gathered: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.reduced: set[int] = set()
        self.agreed = False
        self.rounds: dict[int, int] = defaultdict(int)
        self.updates: dict[int, list[int]] = defaultdict(list)
        self.buffers: dict[int, list[int]] = defaultdict(list)

    @property
    def ended(self) -> bool:
        return self.position == len(self.row)

    def advance(self) -> bool:
        """Run until the rank waits; whether it got anywhere."""
        moved = False
        while not self.ended:
            if self.running is None:
                self.running = self.execute(self.row[self.position])
            if next(self.running, "done") != "done":
                return moved
            self.running = None
            self.position += 1
            moved = True
        return moved

    def result(self) -> Hashable:
        stages = self.program.placement.stages_of[self.rank]
        order = tuple if self.machine.ordered else sorted
        return tuple(
            (tuple(self.updates[stage]), tuple(order(self.gathered[stage])), tuple(order(self.buffers[stage])))
            for stage in stages
        )

    def execute(self, action: Action) -> Iterator[None]:
        """One action; every yield is a wait."""
        stage, kind, microbatch = action
        if kind in (Kind.STEP, Kind.REDUCE):
            if stage >= self.program.num_stages or self.rank not in self.program.placement.ranks_of[stage]:
                raise Wrong(f"{action} on rank {self.rank}")
            yield from self.reduce(stage) if kind is Kind.REDUCE else self.step(stage)
            return
        if kind is Kind.AGREE:
            yield from self.agree(stage)
            return
        place = (stage, microbatch)
        if self.machine.holder(place) != self.rank:
            raise Wrong(f"{action} on rank {self.rank}")
        yield from _TABLE[kind](self, place)

    def read(self, receive: Kind, place: Place, writer: int, local: dict[Place, int]) -> Iterator[None]:
        """Wait for a value of another stage; leaves it in ``self.value``."""
        other = (writer, place[1])
        if self.machine.holder(other) == self.rank:
            if other not in local:
                raise Wrong(f"{place} reads what stage {writer} has not written")
            self.value = local[other]
            return
        slot = (receive, place[0], writer, place[1])
        if slot not in self.inbox:
            raise Wrong(f"{place} reads what was never posted")
        while (found := self.inbox[slot]) is None:
            yield
        self.value = found

    def forward(self, place: Place) -> Iterator[None]:
        stage, microbatch = place
        if place in self.outputs:
            raise Wrong(f"forward of {place} again")
        inputs = []
        for writer in self.program.writers[stage]:
            yield from self.read(Kind.RECV_F, place, writer, self.outputs)
            inputs.append(self.value)
        version = self.version(place)
        weights = ("start", stage) if version == 0 else self.updates[stage][version - 1]
        self.saved[place] = self.outputs[place] = self.machine.intern("F", place, weights, tuple(inputs))
        self.buffers[stage].append(microbatch)
        yield from ()

    def version(self, place: Place) -> int:
        stage, microbatch = place
        made = len(self.updates[stage])
        match self.program.versions:
            case Versions.NEWEST:
                return made
            case Versions.VERTICAL:
                wanted = self.machine.read_at_first_stage.setdefault(microbatch, made)
            case Versions.DELAYED:
                wanted = max(0, self.group(place) - 1)
        if wanted > made:
            raise Wrong(f"{place} reads version {wanted} of {made}")
        return wanted

    def group(self, place: Place) -> int:
        """The update that takes the unit's gradient, by the place of its B or W in the row."""
        found, update = None, 0
        for stage, kind, microbatch in self.row:
            if stage == place[0]:
                update += kind is Kind.STEP
                if kind in (Kind.B, Kind.W) and microbatch == place[1]:
                    found = update
        if found is None:
            raise Wrong(f"{place} has no gradient")
        return found

    def backward(self, place: Place) -> Iterator[None]:
        yield from self.input_grad(place)
        yield from self.weight_grad(place)

    def input_grad(self, place: Place) -> Iterator[None]:
        if place not in self.saved or "out" in self.state[place]:
            raise Wrong(f"backward of {place} without its activations")
        grads = []
        for reader in self.program.readers[place[0]]:
            yield from self.read(Kind.RECV_B, place, reader, self.input_grads)
            grads.append(self.value)
        saved = self.saved.pop(place)
        self.input_grads[place] = self.machine.intern("I", place, saved, tuple(grads))
        self.deferred[place] = self.machine.intern("W", place, saved, tuple(grads))

    def weight_grad(self, place: Place) -> Iterator[None]:
        if place not in self.deferred:
            raise Wrong(f"weight gradient of {place} before its input gradient, or again")
        if self.agreed:
            raise Wrong(f"gradient of {place} after the agreement")
        self.gathered[place[0]].append((place[1], self.deferred.pop(place)))
        self.reduced.discard(place[0])
        yield from ()

    def recompute(self, place: Place) -> Iterator[None]:
        state = self.state[place]
        if place not in self.saved or "out" in state or "recomputed" in state:
            raise Wrong(f"recompute of {place} without its input, or again")
        state.add("recomputed")
        yield from ()

    def swap_out(self, place: Place) -> Iterator[None]:
        state = self.state[place]
        if place not in self.saved or state:
            raise Wrong(f"swap of {place} without its activations, or again")
        state |= {"out", "swapped"}
        yield from ()

    def swap_in(self, place: Place) -> Iterator[None]:
        if "out" not in self.state[place]:
            raise Wrong(f"fetch of {place}, which is not out")
        self.state[place].discard("out")
        yield from ()

    def reduce(self, stage: int) -> Iterator[None]:
        """Meet the other replicas and take everybody's gradients, in the order of units."""
        ranks = self.program.placement.ranks_of[stage]
        if len(ranks) == 1:
            return
        if stage in self.reduced or self.agreed:
            raise Wrong(f"stage {stage} reduces what is reduced")
        meeting = self.machine.meetings[stage, self.rounds[stage]]
        meeting[self.rank] = tuple(self.gathered[stage])
        self.rounds[stage] += 1
        while len(meeting) < len(ranks):
            yield
        self.gathered[stage] = sorted(each for one in meeting.values() for each in one)
        self.reduced.add(stage)

    def agree(self, stage: int) -> Iterator[None]:
        """All ranks come, each with all its gradients and before its first update."""
        if stage not in self.program.placement.stages_of[self.rank]:
            raise Wrong(f"AGREE of stage {stage} on rank {self.rank}")
        if self.machine.ordered or self.agreed or any(self.updates.values()):
            raise Wrong("agrees too late, again, or where stages update one by one")
        self.agreed = True
        self.machine.agreeing.add(self.rank)
        while len(self.machine.agreeing) < len(self.machine.ranks):
            yield

    def step(self, stage: int) -> Iterator[None]:
        grads = self.gathered.pop(stage, [])
        if not grads:
            raise Wrong(f"stage {stage} steps without a gradient")
        if self.program.placement.num_replicas(stage) > 1 and stage not in self.reduced:
            raise Wrong(f"stage {stage} steps alone")
        self.reduced.discard(stage)
        before = self.updates[stage][-1] if self.updates[stage] else ("start", stage)
        taken = grads if self.machine.ordered else sorted(grads)
        self.updates[stage].append(self.machine.intern("step", before, tuple(taken)))
        yield from ()

    def others(self, place: Place, stages: tuple[int, ...]) -> list[int]:
        found = [stage for stage in stages if self.machine.holder((stage, place[1])) != self.rank]
        if not found:
            raise Wrong(f"{place} exchanges with nobody")
        return found

    def send(self, place: Place, forward: bool) -> Iterator[None]:
        local = self.outputs if forward else self.input_grads
        if place not in local:
            raise Wrong(f"{place} sends what it does not have")
        for stage in self.others(place, (self.program.readers if forward else self.program.writers)[place[0]]):
            target = self.machine.holder((stage, place[1]))
            queue = self.machine.posted[_queue(self.rank, target, place[0], stage)]
            while not queue:
                yield
            receive, writer = queue.pop(0)
            kind = Kind.RECV_F if forward else Kind.RECV_B
            if (receive, writer) != (Action(stage, kind, place[1]), place[0]):
                raise Wrong(f"{receive} from stage {writer} gets a message of {place}")
            self.machine.ranks[target].inbox[kind, stage, writer, place[1]] = local[place]

    def receive(self, place: Place, forward: bool) -> Iterator[None]:
        kind = Kind.RECV_F if forward else Kind.RECV_B
        for writer in self.others(place, (self.program.writers if forward else self.program.readers)[place[0]]):
            slot = (kind, place[0], writer, place[1])
            if slot in self.inbox:
                raise Wrong(f"{slot} is posted twice")
            self.inbox[slot] = None
            source = self.machine.holder((writer, place[1]))
            queue = self.machine.posted[_queue(source, self.rank, writer, place[0])]
            queue.append((Action(place[0], kind, place[1]), writer))
        yield from ()


def _queue(source: int, target: int, writer: int, reader: int) -> tuple[int, ...]:
    return (source, target) if abs(writer - reader) == 1 else (source, target, writer, reader)


_TABLE = {
    Kind.F: _Rank.forward,
    Kind.B: _Rank.backward,
    Kind.I: _Rank.input_grad,
    Kind.W: _Rank.weight_grad,
    Kind.R: _Rank.recompute,
    Kind.OUT: _Rank.swap_out,
    Kind.IN: _Rank.swap_in,
    Kind.SEND_F: lambda rank, place: rank.send(place, True),
    Kind.SEND_B: lambda rank, place: rank.send(place, False),
    Kind.RECV_F: lambda rank, place: rank.receive(place, True),
    Kind.RECV_B: lambda rank, place: rank.receive(place, False),
}
