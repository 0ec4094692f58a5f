"""Batches in the order of training, read ahead by threads if asked to.

The position that a checkpoint stores must be that of the batch the trainer has in hand, not of the one a thread is
reading. The order therefore moves when a batch is handed over, and threads only ever look ahead of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from vpipe.data.dataset import Batch, DataSet
from vpipe.data.order import BatchOrder
from vpipe.errors import UserError


class Loader:
    """``for batch in Loader(data, order, num_workers=2)``: the rest of the order's epoch.

    ``num_workers`` threads keep twice as many batches ready; 0 reads each batch when it is asked for. The tensors are
    the same.
    """

    def __init__(self, data: DataSet, order: BatchOrder, num_workers: int = 0) -> None:
        if num_workers < 0:
            raise UserError(f"num_workers is {num_workers}; it must be 0 (no threads) or more")
        self.data, self.order, self.num_workers = data, order, num_workers

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        if self.num_workers == 0:
            yield from map(self.data.batch, self.order)
            return
        epoch, next_to_read = self.order.epoch, self.order.batch
        ready: deque[Future[Batch]] = deque()
        threads = ThreadPoolExecutor(self.num_workers, thread_name_prefix="vpipe-data")
        try:
            for _ in self.order.positions():
                while next_to_read < len(self.order) and len(ready) < 2 * self.num_workers:
                    ready.append(threads.submit(self.data.batch, self.order.indices(next_to_read, epoch)))
                    next_to_read += 1
                yield ready.popleft().result()
        finally:
            threads.shutdown(wait=True, cancel_futures=True)
