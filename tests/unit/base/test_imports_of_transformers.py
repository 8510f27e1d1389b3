"""What a process of llmtrain saves of the import of transformers, with the same result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.base import imports
from llmtrain.base.imports import _listed

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
    (kept,) = (tmp_path / "transformers").iterdir()
    whole = kept.read_text()
    kept.write_text(whole[: len(whole) // 2])
    assert said(tmp_path) == ["False", "True"] and kept.read_text() == whole


@pytest.mark.parametrize("content", ["5", "[]", "[[1, 2]]", "{}", '[[["torch"], {"a": 5}]]', "null", ""])
def test_a_file_of_another_shape_is_no_listing(content: str, tmp_path: Path) -> None:
    (file := tmp_path / "listing.json").write_text(content)
    assert _listed(file) is None


def test_another_version_in_the_same_place_has_a_listing_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same time: images are built with one time for all files."""
    monkeypatch.setattr(imports, "version", lambda _: "5.23.0")
    first = imports._listing_of(tmp_path)
    monkeypatch.setattr(imports, "version", lambda _: "5.24.0")
    assert imports._listing_of(tmp_path) != first
    monkeypatch.setattr(imports, "version", lambda _: "5.24.0.dev0")  # its files change under one version
    assert imports._structure(lambda *given: given, tmp_path, tmp_path, "models") == (tmp_path, "models")


LATE = """
import ast, importlib, sys
import llmtrain.models
from llmtrain.base.imports import _Late, hide_torchao
hide_torchao()
from transformers import LlamaForCausalLM
assert not {"torch._dynamo", "torch.distributed.tensor", "sympy"} & sys.modules.keys()
count = 0
for module in [module for name, module in sys.modules.items() if name.startswith("transformers.")]:
    names = {name: value._place for name, value in vars(module).items() if type(value) is _Late}
    for node in ast.walk(ast.parse(open(module.__file__).read())) if names else ():
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            assert not {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)} & names.keys()
    for place, name in names.values():
        getattr(importlib.import_module(place), name)
    count += len(names)
import torch
assert torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2)).tolist() == [2, 2]
print(count)
"""


def test_names_that_load_late_are_those_of_their_modules_and_no_classes_to_ask_for() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) > 20, done.stderr
