"""The Chinese GPT-2 of VPipe's `cpm` folder, as sizes of the one GPT-2 that we have."""

from __future__ import annotations

from vpipe.models.gpt import gpt2, sized

cpm_medium = sized(
    gpt2, "24 layers of 1024.", vocab_size=30000, hidden_size=1024, num_layers=24, num_heads=16, sequence_length=1024
)
cpm_large = sized(
    gpt2, "32 layers of 2560.", vocab_size=30000, hidden_size=2560, num_layers=32, num_heads=32, sequence_length=1024
)
