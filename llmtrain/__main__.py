"""`python -m llmtrain` is `llmtrain`."""

import sys

from llmtrain.cli import main

sys.exit(main())
