"""``python -m vpipe.config > docs/config.md``: the reference page on standard output."""

import sys

from vpipe.config.reference import reference

sys.stdout.write(reference())
