"""The same as `llmtrain checkpoint`, from a clone that is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llmtrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["checkpoint", *sys.argv[1:]]))
