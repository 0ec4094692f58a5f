"""OurGPipe's old command, for old habits: ``gpipe_runner.py --config configs/gpt_small.yaml`` is ``vpipe train``.

It works alone and under torchrun: ``torchrun --nproc_per_node=4 gpipe_runner.py --config configs/gpt_small.yaml``.
"""

import sys

from vpipe.compat.commands import gpipe_runner

if __name__ == "__main__":
    sys.exit(gpipe_runner())
