"""The size of the project: lines, files, functions, words; `make lint` prints it beside the last commit's figures.

python tools/figures.py [--against COMMIT]
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


def files_of(commit: str | None, folder: str, suffix: str) -> dict[str, str]:
    """Path -> text of the files of a folder, as they are here or at a commit."""
    if commit is None:
        found = (path for path in (REPO / folder).rglob(f"*{suffix}") if path.is_file())
        return {str(path.relative_to(REPO)): path.read_text(encoding="utf-8") for path in found}
    git = ["git", "-C", str(REPO)]
    listing = [*git, "ls-tree", "-r", "--name-only", commit, f"{folder}/"]
    names = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
    names = [name for name in names if name.endswith(suffix)]
    asked = "".join(f"{commit}:{name}\n" for name in names)
    done = subprocess.run([*git, "cat-file", "--batch"], input=asked.encode(), capture_output=True, check=True).stdout
    files, at = {}, 0
    for name in names:
        head, _, rest = done[at:].partition(b"\n")
        size = int(head.split()[2])
        files[name], at = rest[:size].decode("utf-8"), at + len(head) + 1 + size + 1
    return files


def figures(commit: str | None) -> dict[str, int]:
    """Name -> count, of the working tree or a commit."""
    package, tests, docs = (
        files_of(commit, *kind) for kind in (("llmtrain", ".py"), ("tests", ".py"), ("docs", ".md"))
    )
    nodes = [node for text in package.values() for node in ast.walk(ast.parse(text))]
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = (ast.get_docstring(node) for node in nodes if isinstance(node, owners))
    helpers = {name: text for name, text in tests.items() if name.startswith("tests/helpers/")}
    return {
        "package lines": lines(package),
        "package files": len(package),
        "config/ lines": lines({name: text for name, text in package.items() if name.startswith("llmtrain/config/")}),
        "functions": len(functions),
        "words of docstrings": sum(len(text.split()) for text in documented if text),
        "test lines": lines(tests) - lines(helpers),
        "test helper lines": lines(helpers),
        "words of docs": sum(len(text.split()) for text in docs.values()),
    }


def lines(files: dict[str, str]) -> int:
    """Lines of all of them."""
    return sum(text.count("\n") for text in files.values())


def main() -> None:
    """Print the figures, and how they differ from those of a commit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", default="HEAD", help="commit to compare with (default: the last one)")
    against = parser.parse_args().against
    now = figures(None)
    try:
        before = figures(against)
    except (subprocess.CalledProcessError, OSError):  # a copy without its history
        before = {}
    for name, count in now.items():
        change = count - before.get(name, count)
        print(f"{name:>20}: {count:>7,}{f'  ({change:+,} since {against})' if change else ''}")


if __name__ == "__main__":
    main()
