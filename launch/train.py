"""`llmtrain train` for a start by hand, from a clone that need not be installed. `llmtrain launch` does not need it.

deepspeed --hostfile hosts launch/train.py --config launch/recipes/NAME.yaml [--section.key value ...]

On one machine without sshd, deepspeed needs `--no_ssh_check --master_addr 127.0.0.1` before launch/train.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone that is not installed

from llmtrain.cli import run

if __name__ == "__main__":
    run(["train", *sys.argv[1:]])
