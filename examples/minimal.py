"""Four stages, one script: ``vpipe run --nproc 4 examples/minimal.py``, torchrun, or plain python; the same losses."""

import torch
from torch import nn

import vpipe

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)]
x, y = torch.randn(32, 16), torch.randn(32, 16)
pipe = vpipe.Pipeline(layers, nn.functional.mse_loss, num_ranks=4, num_microbatches=8, optimizer=torch.optim.AdamW)
for step in range(5):
    loss = pipe.train_step(x, y)
    if pipe.is_first:
        print(f"step {step}: loss {loss:.6f}")
