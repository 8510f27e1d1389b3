"""An environment in which a library has another text."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from tests.helpers.launching import installed_by_make


def other_library(folder: Path, file: str, was: str, is_now: str) -> Path:
    """Make a virtual environment with links to this one's packages and a copy of one file, changed. Returns its
    interpreter. `file`: below site-packages."""
    python = installed_by_make(folder)
    place, source = Path(sysconfig.get_path("purelib", vars={"base": str(folder)})), Path()
    *above, name = Path(file).parts
    for part in above:  # a folder of links instead of a link to a folder
        place /= part
        source = place.resolve()
        place.unlink()
        place.mkdir()
        for each in source.iterdir():
            (place / each.name).symlink_to(each)
    text = (source / name).read_text()
    assert was in text, "the library has another text now: seed the difference elsewhere"
    (place / name).unlink()
    (place / name).write_text(text.replace(was, is_now))
    return python
