"""The loss on held-out data, as a mean over its targets; of the weights' averages where they are kept."""

from __future__ import annotations

from vpipe.errors import UserError
from vpipe.runtime.updates.averages import averaged
from vpipe.train.feed import Feed
from vpipe.train.session import Session, feed_of


class Evaluation:
    """Held-out batches in a fixed order. ``why_not`` says why there are none."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._feed: Feed | None = None
        self.why_not = ""
        self.examples = self.targets = 0
        """What the last one read, and how many targets counted."""
        if session.data.valid is None:
            self.why_not = "the data set holds nothing out"
            return
        try:
            fixed = {"shuffle": False, "whole": True, "seed": 0, "num_workers": 0}
            self._feed = feed_of(session.config, session.data.valid, session.model, **fixed)
        except UserError as error:
            self.why_not = f"of the held-out part, {error}"

    @property
    def num_batches(self) -> int:
        if self._feed is None:
            return 0
        most = self._session.config.training.evaluation_batches
        return self._feed.num_batches if most < 0 else min(most, self._feed.num_batches)

    def run(self) -> float:
        """The mean loss; every rank calls this, and those that read data know the answer."""
        assert self._feed is not None, "asked only where there are batches"
        session, total, targets = self._session, 0.0, 0
        session.prepare()
        self.examples = 0
        with averaged(session.pipeline):
            for place in range(self.num_batches):  # spread over all: by tokens, the first are the shortest
                position = (0, place * self._feed.num_batches // self.num_batches)
                units = session.units(self._feed, [position])
                loss = session.evaluate(units)
                self.examples += self._feed.num_examples(position)
                if units is not None:
                    count = units.counts.num_targets
                    total, targets = total + loss * count, targets + count
        self.targets = targets
        return total / max(targets, 1)
