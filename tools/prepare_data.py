"""`llmtrain prepare`, for those who look for it here. Same options: python tools/prepare_data.py --help"""

from __future__ import annotations

import sys

from llmtrain.commands.prepare import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
