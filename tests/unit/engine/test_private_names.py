"""Private names of other packages stand in few places, each in a table with its reason, and a start misses none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.base.errors import ConfigError
from llmtrain.engine.deepspeed import patches

PACKAGE = Path(patches.__file__).parents[2]
ELSEWHERE = {
    "features/deepspeed_checkpoints/pickles.py": {
        "_storage_classes",
        "_checkpoint_offset",
    },  # of torch: how it reads a .pt
    "parity/plain.py": {"_model_mapping", "_supports_sdpa"},  # it shares no more code with a run than it must
    "data/chat/rendering.py": {"_compile_jinja_template"},  # the environment of a chat template, whose clock is set
    "optim/lion.py": {"_foreach_mul_", "_foreach_sign", "_foreach_add_", "_foreach_lerp", "_foreach_lerp_"},
    # of two versions of torch, whose code load_late was written for; others load as always
    "base/imports.py": {"_disable_dynamo", "_use_grad_for_differentiable", "__dynamo_disable"},
    "engine/progress.py": {"_C", "_distributed_c10d", "_dump_nccl_trace_json"},  # the flight recorder has no other name
}
"""What may be named outside, and why."""
IN_FUNCTIONS_OF_THEIR_OWN = "_private.py"
"""End of a file with a function for each name: Python raises where it is gone, and nothing is asked with a default."""
PUBLIC = {"_exit", "_current_frames", "_asdict"}  # documented: os._exit, sys._current_frames, those of named tuples


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def own_names() -> set[str]:
    """Private names that this package gives to something itself."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    found.add(name)
    return found


def foreign(path: Path, own: set[str]) -> Iterator[tuple[str, int]]:
    """(private name of another package, line) as attribute, import, or text of getattr and its kin."""
    for node in ast.walk(tree_of(path)):
        names: list[str] = []
        match node:
            case ast.Attribute(attr=name):
                names = [name]
            case ast.ImportFrom(module=str(module), names=aliases) if not module.startswith(("llmtrain", "__")):
                names = [alias.name for alias in aliases]
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                names = [name]
        for name in names:
            if name.startswith("_") and not name.endswith("__") and name not in own | PUBLIC:
                yield name, node.lineno


def tabled_in(path: Path) -> set[str]:
    """The names in a file's own table, which it checks itself."""
    tables = [
        node
        for node in tree_of(path).body
        if isinstance(node, ast.Assign) and "PRIVATE" in ast.unparse(node.targets[0])
    ]
    return {each.value for table in tables for each in ast.walk(table) if isinstance(each, ast.Constant)}


def test_private_names_of_others_stand_behind_the_door():
    own = own_names()
    tabled = {name for private in patches.PRIVATE for name in private.names}
    stray = []
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE).as_posix()
        for name, line in foreign(path, own):
            allowed = tabled if where.startswith("engine/deepspeed/") else ELSEWHERE.get(where, tabled_in(path))
            if name not in allowed and not where.endswith(IN_FUNCTIONS_OF_THEIR_OWN):
                stray.append(f"{where}:{line} {name}")
    assert not stray, stray


def test_all_that_a_run_depends_on_is_there():
    patches.check()


def test_a_package_that_lacks_one_is_refused_by_its_version():
    gone = patches.Private("deepspeed.runtime.zero.stage3", ("_partition_all_parameters", "_renamed"), "for a test")
    moved = patches.Private("deepspeed.moved", ("anything",), "for a test")
    for private, named in ((gone, r"0\.19\.8: deepspeed\.runtime\.zero\.stage3 .*_renamed"), (moved, "anything")):
        with pytest.raises(ConfigError, match=named) as refused:
            patches.check((private,))
        assert "_partition_all_parameters" not in str(refused.value)
