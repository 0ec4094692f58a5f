"""VPipe's old command, for old habits: ``driver.py --config_file configs/bert_4vpipe.yml`` is ``vpipe train``."""

import sys

from vpipe.compat.commands import driver

if __name__ == "__main__":
    sys.exit(driver())
