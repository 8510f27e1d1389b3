"""Imports go one way, and the light parts stay light. Lazy imports inside functions count, and modules in strings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import llmtrain

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "llmtrain"

# A part may import from its own layer's own part and from every layer above it in this list.
# Parts that share a layer are siblings: they never import each other. "features" is the registry, llmtrain/features/
# __init__.py, which loads the folders by their names; "feature" is such a folder, which no other file imports.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("base",),
    ("features",),
    ("objectives", "optim", "storage"),
    ("tracking",),
    ("cluster", "config"),
    ("data", "models", "reports"),
    ("engine",),
    ("checkpoint",),
    ("training",),
    ("parity",),
    ("commands",),
    ("feature",),
    ("cli",),
    ("__main__",),
)
LAYER_OF = {part: depth for depth, parts in enumerate(LAYERS) for part in parts}
HEAVY = {"torch", "deepspeed", "transformers", "numpy", "pandas"}
LIGHT = (
    "base",
    "objectives",
    "optim",
    "storage/addresses.py",
    "storage/hub.py",
    "tracking",
    "config",
    "cluster",
    "reports",
    "commands/completion.py",
    "commands/init.py",
    "commands/launch.py",
    "features/doctor",
    "features/report",
    "features/watch",
    "cli.py",
    "__main__.py",
)
# Imported by a `build` of optim/optimizers.py; a program of its own, with a world of its own.
ALONE = ("optim/lion.py", "features/doctor/all_reduce.py")
# Inside functions only: `config check` and `train` ask the installed DeepSpeed; an engine builds an optimizer.
LAZILY: dict[str, str | tuple[str, ...]] = {
    "config/deepspeed/read.py": "deepspeed",
    "optim/optimizers.py": ("torch", "deepspeed"),
}
THE_SITE = "models/parallel/mesh.py"  # the one place that names torch's world
LAZY_DISPATCH = ("__init__", "cli", "__main__")
# Names of the Python door, and of a group of entry points.
NO_MODULES = {*(f"llmtrain.{name}" for name in llmtrain.__all__), "llmtrain.plugins"}
# Which other parts of cluster a part of it may import.
WITHIN_CLUSTER: dict[str, set[str]] = {"gpus": set(), "hosts": set(), "launch": {"hosts"}}
RANK = "commands/train.py"
# Every run imports these, most of them inside a function, and with each the modules that it imports at its top.
OF_EVERY_RUN = (
    "cli",
    "commands/train",
    "training/examine",
    "models/run/check",
    "training/run",
    "checkpoint/hf/exporting",
    "checkpoint/hf/inference",
)
MOST_MODULES, MOST_LINES = 143, 27_600
MODULE = re.compile(r"\bllmtrain(?:\.\w+)+")
SOURCE = re.compile(r"(?:\w+/)+\w+\.py\b")

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(file: Path) -> str:
    """llmtrain/data/stream/loader.py -> data; llmtrain/cli.py -> cli; llmtrain/features/ema/part.py -> feature."""
    names = file.relative_to(ROOT).with_suffix("").parts
    return part_of_module(".".join(names))


def part_of_module(module: str) -> str:
    """Return the part of a dotted name in llmtrain."""
    names = module.split(".")
    is_feature = names[1] == "features" and len(names) > 2 and (PACKAGE / "features" / names[2]).is_dir()
    return "feature" if is_feature else names[1]


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def strings(file: Path) -> Iterator[tuple[str, int]]:
    """(text, line) of every string that is no docstring."""
    documented = {id(node.value) for node in ast.walk(tree_of(file)) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield node.value, node.lineno


def imported(file: Path) -> Iterator[tuple[str, int]]:
    """(dotted module, line) of every import of the file, relative ones resolved, and of every module in its strings.

    `python -m llmtrain.x.y` needs that module as much as an import does.
    """
    for text, line in strings(file):
        yield from ((name, line) for name in MODULE.findall(text))
    package = list(file.relative_to(ROOT).parent.parts)
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            # `from llmtrain import units` names the part in the second half
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def test_every_part_has_a_layer() -> None:
    parts = {part_of(file) for file in FILES if file.parent != PACKAGE or file.stem != "__init__"}
    assert parts <= set(LAYER_OF), "name the new part in LAYERS"


def test_imports_go_one_way() -> None:
    wrong = []
    for file in FILES:
        part = part_of(file)
        for module, line in imported(file):
            other = part_of_module(module) if module.startswith("llmtrain.") else ""
            if other not in LAYER_OF or other == part:
                continue
            if LAYER_OF[other] >= LAYER_OF.get(part, -1) and part not in LAZY_DISPATCH:
                wrong.append(f"{file.relative_to(PACKAGE)} line {line}: {part} may not import {module}")
    assert not wrong, "\n".join(wrong)


def test_nothing_outside_imports_a_feature() -> None:
    """A folder of features that is deleted takes nothing with it: no other file names its modules."""
    wrong = []
    for file in FILES:
        for module, line in imported(file):
            of_feature = module.startswith("llmtrain.features.") and part_of_module(module) == "feature"
            if of_feature and file.relative_to(PACKAGE).parts[:2] != tuple(module.split(".")[1:3]):
                wrong.append(f"{file.relative_to(PACKAGE)} line {line}: {module}")
    assert not wrong, "\n".join(wrong)


def test_the_folders_of_cluster_import_one_way() -> None:
    wrong = []
    for file in FILES:
        names = file.relative_to(PACKAGE).parts
        if names[0] != "cluster" or names[1] == "__init__.py":
            continue
        own = names[1].removesuffix(".py")
        for module, line in imported(file):
            what = module.split(".")
            if what[:2] == ["llmtrain", "cluster"] and what[2] not in {own, *WITHIN_CLUSTER[own]}:
                wrong.append(f"{file.relative_to(PACKAGE)} line {line}: {own} may not import {module}")
    assert not wrong, "\n".join(wrong)


def folder_of(file: Path) -> str:
    """llmtrain/models/parallel/mesh.py -> models/parallel; folders below the top are held by LAYERS."""
    return str(file.parent.relative_to(PACKAGE))


@cache
def graph() -> dict[Path, set[Path]]:
    """File -> the files of llmtrain that it imports."""
    file_of = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in FILES}
    return {
        file: {
            file_of[name]
            for module, _ in imported(file)
            for name in (module, module.rpartition(".")[0])
            if name in file_of and file_of[name] != file
        }
        for file in FILES
    }


def test_no_files_import_each_other_in_a_circle() -> None:
    TopologicalSorter(graph()).prepare()  # raises CycleError, which names the files


def test_no_two_folders_of_a_part_import_each_other() -> None:
    pairs = {
        (folder_of(file), folder_of(other))
        for file, others in graph().items()
        for other in others
        if part_of(file) == part_of(other)
        and folder_of(file) != folder_of(other)
        # config/resolve.py uses config/deepspeed/, and that config/run.py: no circle of files
        and file.parent not in other.parents
        and other.parent not in file.parents
    }
    assert not {pair for pair in pairs if pair[::-1] in pairs and pair < pair[::-1]}


def test_a_rank_needs_nothing_of_cluster() -> None:
    """`llmtrain train` and all that it may import use base/rank; an agent of the host is a process beside it."""
    reached, todo = set(), [PACKAGE / RANK]
    while todo:
        file = todo.pop()
        if file not in reached:
            reached.add(file)
            todo += graph()[file]
    assert PACKAGE / "training/run.py" in reached and PACKAGE / "base/rank/heartbeat.py" in reached
    assert not [str(file.relative_to(PACKAGE)) for file in reached if part_of(file) == "cluster"]


def at_the_top(file: Path) -> Iterator[tuple[str, int]]:
    """The imports of a file that are in no function and no `if TYPE_CHECKING`."""
    lines = {node.lineno for node in tree_of(file).body if isinstance(node, (ast.Import, ast.ImportFrom))}
    return ((module, line) for module, line in imported(file) if line in lines)


def test_a_plain_run_loads_what_it_needs() -> None:
    """A part for a store, a plugin, a tracker, several ranks or a mistake is imported where the run asks for it."""
    reached, todo = set(), [PACKAGE / f"{name}.py" for name in OF_EVERY_RUN]
    while todo:
        file = todo.pop()
        if file not in reached:
            names = {name for module, _ in at_the_top(file) for name in (module, module.rpartition(".")[0])}
            packages = {parent / "__init__.py" for parent in file.parents if parent.is_relative_to(PACKAGE)}
            reached.add(file)
            todo += (graph()[file] & {ROOT / f"{name.replace('.', '/')}.py" for name in names}) | packages
    assert len(reached) <= MOST_MODULES
    assert sum(file.read_text(encoding="utf-8").count("\n") for file in reached) <= MOST_LINES


def test_light_parts_import_nothing_heavy() -> None:
    named = {str(file.relative_to(PACKAGE)): file for file in FILES}
    wrong, light = [], [file for name, file in named.items() if name.startswith(LIGHT) and name not in ALONE]
    for file in light:
        heavy = [(module, line) for module, line in imported(file) if module.split(".")[0] in HEAVY]
        if lazy := LAZILY.get(str(file.relative_to(PACKAGE))):
            top_level = set(at_the_top(file))
            heavy = [each for each in heavy if each in top_level or not each[0].startswith(lazy)]
        wrong += [f"{file.relative_to(PACKAGE)} line {line}: {module}" for module, line in heavy]
    assert not wrong, "\n".join(wrong)
    assert len(light) > 60, "the names in LIGHT are those of files"


def test_deepspeed_initialize_is_called_in_one_file() -> None:
    """By whatever name: through the module, through an alias of it, or imported from it."""
    callers = set()
    for file in FILES:
        aliases = {
            alias.asname or alias.name
            for node in ast.walk(tree_of(file))
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name == "deepspeed"
        }
        for node in ast.walk(tree_of(file)):
            called = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "initialize"
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in aliases
            )
            if called:
                callers.add(str(file.relative_to(PACKAGE)))
        if any(module.split(".") == ["deepspeed", "initialize"] for module, _ in imported(file)):
            callers.add(str(file.relative_to(PACKAGE)))
    assert callers == {"engine/deepspeed/build.py"}


def test_collectives_name_their_group_and_count_ranks_within_it() -> None:
    """A site's ranks are not all there are: outside of engine/ranks, which makes the first, nothing reaches beyond."""
    from llmtrain.base.rank.heartbeat import _FUNCTIONS

    makers = {"new_group", "split_group"}
    reaching = {*_FUNCTIONS, "get_rank", "get_world_size", "get_backend"} - makers
    rooted = {"broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "scatter", "send", "recv"}
    seen, wrong = 0, []
    for file in FILES:
        where = str(file.relative_to(PACKAGE))
        others = [m for m, _ in imported(file) if m.startswith(("torch.distributed.", "deepspeed.comm"))]
        wrong += [f"{where}: {module}" for module in others]
        for node in ast.walk(tree_of(file)):
            match node:
                case _ if where.startswith(("engine/ranks/", *ALONE)):
                    break
                case ast.Attribute(attr="WORLD") if where != THE_SITE:
                    wrong.append(f"{where}:{node.lineno} {ast.unparse(node)}")
                case ast.Call(func=ast.Attribute(ast.Name("dist"), name), args=args) if name in reaching:
                    given = {keyword.arg for keyword in node.keywords}
                    named = "group" in given or (name.startswith("get_") and args)
                    counted = name not in rooted or given & {"group_src", "group_dst"}
                    if not (named and counted) or given & {"src", "dst"}:
                        wrong.append(f"{where}:{node.lineno} {ast.unparse(node)}")
                    seen += 1
    assert not wrong, "\n".join(wrong)
    assert seen > 40, "the walker sees them"


def test_process_groups_are_made_in_one_file() -> None:
    """Beside NCCL a group that torch makes its usual way lets ranks outside of it wait for ever (mesh.host_group)."""
    makers: dict[str, set[str]] = {}
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            match node:
                case (
                    ast.Attribute(attr="new_group" | "split_group" | "new_subgroups" as name)
                    | ast.alias(name="new_group" | "split_group" | "new_subgroups" as name)
                ):
                    makers.setdefault(str(file.relative_to(PACKAGE)), set()).add(name)
    assert makers == {"models/parallel/mesh.py": {"new_group", "split_group"}}


def test_modules_and_files_that_strings_name_are_there() -> None:
    """After a rename the watch would know a file in a stack no more, and say so to nobody."""
    gone = []
    for file in FILES:
        for text, line in strings(file):
            where = f"{file.relative_to(PACKAGE)} line {line}"
            for module in MODULE.findall(text):
                path = ROOT / module.replace(".", "/")
                there = path.with_suffix(".py").exists() or (path / "__init__.py").exists()
                if not there and module not in NO_MODULES:
                    gone.append(f"{where}: {module}")
            for source in SOURCE.findall(text):
                below = source.removeprefix("llmtrain/")
                ours = source.startswith("llmtrain/") or (PACKAGE / below.split("/")[0]).exists()
                if ours and not (PACKAGE / below).exists():
                    gone.append(f"{where}: {source}")
    assert not gone, "\n".join(gone)


def test_the_walker_sees_lazy_and_plain_imports_and_strings() -> None:
    assert "llmtrain.checkpoint.writer" in {module for module, _ in imported(PACKAGE / "checkpoint/snapshot.py")}
    assert "llmtrain.base.errors.UserError" in {module for module, _ in imported(PACKAGE / "cli.py")}
    lazy = {module for module, _ in imported(PACKAGE / "config/deepspeed/read.py")}
    assert "deepspeed.runtime.config.DeepSpeedConfig" in lazy
