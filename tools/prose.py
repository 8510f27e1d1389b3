"""The words that docs/developers/style.md replaces, on the lines that a change adds; `make lint` runs it.

python tools/prose.py [--against COMMIT]

Reads docstrings, comments and texts of llmtrain/, tests/, tools/, and the pages. Exit code 1 where it finds a word.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]

PLAIN = {
    r"besides?": "next to, with",
    r"anew": "again",
    r"alike": "equally, the same error",
    r"otherwise than": "differently from",
    r"tells?|told": "reports, says",
    r"stands?|lies": "is",
    r"go(es)? on": "continues",
    r"takes? part": "is used",
    r"in (the )?place of": "instead of",
    r"hands? on": "returns, passes on",
    r"whole(?! number)": "complete, all",
    r"so many|so much": "a number",
    r"such an?": "name the thing",
    r"whoever": "name the person or part",
    r"meanwhile": "in the meantime",
    r"mend(s|ed|ing)?": "fix",
}
WORDS = re.compile(rf"\b({'|'.join(PLAIN)})\b", re.IGNORECASE)
OPENING = re.compile(r'^[rbuf]*"""(What|Whether|How|Which|Where|Why|Who|Of|That of|Those of|In which|The same)\b')


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(REPO), *words], capture_output=True, text=True, check=True).stdout


def added(against: str) -> dict[Path, set[int]]:
    """Numbers of the lines that are new since a commit, by file; files that git does not track are new completely."""
    lines: dict[Path, set[int]] = defaultdict(set)
    file = REPO
    for row in git("diff", "-U0", against, "--", "*.py", "*.md").splitlines():
        if row.startswith("+++ "):
            file = REPO / row[len("+++ b/") :]
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", row):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            if count:
                lines[file].update(range(first, first + count))
    for name in git("ls-files", "--others", "--exclude-standard", "--", "*.py", "*.md").splitlines():
        lines[REPO / name].update(range(1, (REPO / name).read_text(encoding="utf-8").count("\n") + 2))
    return lines


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of each line with prose: of a page outside its code blocks, of comments and strings in Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        code = False
        for number, line in enumerate(text.splitlines(), 1):
            code ^= line.startswith("```")
            if not code:
                yield number, line
        return
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, re.sub(r"\{[^{}]*\}", "", line)  # names within an f-string


def findings(against: str) -> list[str]:
    """A line for each word or opening that the style page replaces."""
    found = []
    for path, numbers in sorted(added(against).items()):
        if path.name in ("prose.py", "test_prose.py", "style.md"):  # they name the words
            continue
        for number, line in prose(path):
            if number not in numbers:
                continue
            line = re.sub(r"`[^`]*`", "", line)
            for match in WORDS.finditer(line):
                plain = next(plain for word, plain in PLAIN.items() if re.fullmatch(word, match[0], re.IGNORECASE))
                found.append(f"{path.relative_to(REPO)}:{number}: {match[0]!r}: write {plain}")
            if opening := OPENING.match(line):
                found.append(
                    f"{path.relative_to(REPO)}:{number}: begins with {opening[1]!r}: begin with a verb or a noun"
                )
    return found


def main() -> int:
    """Print the findings of the uncommitted change, or, in a clean tree, of the last commit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", help="commit to compare with")
    against = parser.parse_args().against
    try:
        found = findings(against or ("HEAD" if git("status", "--porcelain").strip() else "HEAD~1"))
    except (subprocess.CalledProcessError, FileNotFoundError):
        print("prose: no git history to compare with")
        return 0
    print("\n".join(found) or "prose: no word that the style page replaces on the changed lines")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
