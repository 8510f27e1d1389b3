"""The worker of `llmtrain parity` with the fault that the environment names."""

from __future__ import annotations

import os
import sys

from llmtrain.parity import trainer
from tests.helpers.faults import FAULTS

if __name__ == "__main__":
    with FAULTS[os.environ["FAULT"]].seeded():
        sys.exit(trainer.main(sys.argv[1:]))
