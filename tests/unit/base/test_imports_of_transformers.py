"""What a process of llmtrain saves of the import of transformers, with the same result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from llmtrain.base.imports import hide_torchao, keep_listing
keep_listing()
hide_torchao()
import transformers.utils.import_utils as utils
from transformers import LlamaForCausalLM
from llmtrain.base.imports import _structure
from pathlib import Path
models = Path(utils.__file__).parents[1] / "models"
define = utils.define_import_structure.args[0]
read = _structure(define, models, models, "models")
assert read == define(models, "models") and len(read) > 5
print(*(name in sys.modules for name in ("torchao", "transformers.models.llama.modeling_llama")))
"""


def said(cache: Path) -> list[str]:
    env = {**os.environ, "LLMTRAIN_CACHE": str(cache)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_listing_is_kept_and_torchao_is_not_imported(tmp_path: Path) -> None:
    assert said(tmp_path) == ["False", "True"]
    kept = tmp_path / "transformers.json"
    whole = kept.read_text()
    kept.write_text(whole[: len(whole) // 2])
    assert said(tmp_path) == ["False", "True"] and kept.read_text() == whole
    other = json.loads(whole)
    other["key"][1] -= 1  # another version in the same place
    other["rows"] = other["rows"][:1]
    kept.write_text(json.dumps(other))
    assert said(tmp_path) == ["False", "True"] and kept.read_text() == whole
