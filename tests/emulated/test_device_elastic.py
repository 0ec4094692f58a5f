"""What elastic runs need of devices: a wait on a stream for a rank that is gone can be ended; until all is there they
are refused in words."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from emulated_ranks import on_ranks

from vpipe.errors import UserError
from vpipe.train.sizes import refuse_sizes

JOB: dict[str, Any] = {
    "model": {"name": "gpt", "hidden_size": 16, "num_layers": 4, "num_heads": 2, "sequence_length": 8},
    "dataset": {"name": "synthetic", "batch_size": 8},
    "training": {"num_microbatches": 4, "max_iterations": 2},
    "launch": {"elastic": "2:2"},
}


@pytest.mark.parametrize("wanted", ["auto", "emu"])
def test_an_elastic_run_on_devices_is_refused_in_a_sentence(wanted: str) -> None:
    """Also where nobody has named the accelerator that auto takes."""
    config = JOB | {"parallel": {"model_parallel_size": 2, "scheduler": "1f1b", "device": wanted}}
    with pytest.raises(UserError, match="compute on the CPU, not on"):
        refuse_sizes(config)
    refuse_sizes(config | {"parallel": config["parallel"] | {"device": "cpu"}})


def lonely(rank: int) -> Any:
    """Rank 0 waits on its device for a message that rank 1 never sends, until another thread ends the communicators."""
    from vpipe.runtime.ranks import device_groups
    from vpipe.runtime.transport.wire import Envelope
    from vpipe.train.proof import device_suite

    device = torch.device("emu", rank)
    transport = device_suite.between_devices(device)
    transport.begin_program("a program", lambda: "data of one form")
    transport.begin_step(0)
    found: list[Any] = []
    if rank:
        transport.send(Envelope(0, 0, 1, 0, 0)._replace(source=1, target=0), 0, torch.ones(8, device=device))
        transport.host.barrier()
    else:
        envelope = Envelope(0, 0, 1, 0, 0)._replace(source=1, target=0)
        transport.post(envelope, 1)
        found.append(float(transport.take(envelope).sum()))
        transport.host.barrier()
    transport.begin_program("a program", lambda: "data of one form")
    transport.begin_step(1)
    if rank == 0:
        envelope = envelope._replace(step=1)
        transport.post(envelope, 1)
        total = transport.take(envelope).sum()
        threading.Timer(0.5, device_groups.abort).start()
        try:
            found.append(float(total))
        except RuntimeError as error:
            found.append("aborted" in str(error))
        device_groups.forget()
        found.append(float(torch.ones(4, device=device).sum()))
    transport.host.barrier()
    return found


@pytest.mark.slow
def test_a_wait_on_a_device_can_be_ended_by_another_thread() -> None:
    assert on_ranks(lonely, 2, timeout=120)[0] == [8.0, True, 4.0]
