"""A text file as people try a trainer with: a play of 1.1 MB, the size and shape of tiny Shakespeare, one document."""

from __future__ import annotations

import random
from pathlib import Path

BYTES = 1_115_394


def write_play(path: Path, size: int = BYTES) -> Path:
    """Speeches of a name, a colon and some lines of words, with an empty line between; `size` bytes of ASCII."""
    rng = random.Random(7)
    words = ["".join(rng.choices("etaoinshrdlucmfwypvbgk", k=rng.randint(1, 9))) for _ in range(8000)]
    frequencies = [1 / (rank + 3) for rank in range(len(words))]
    names = ["".join(rng.choices("ABCDEFGHIJKLMNOPRSTU", k=rng.randint(4, 9))) for _ in range(60)]
    drawn = iter(rng.choices(words, frequencies, k=size // 3))
    speeches, length = [], 0
    while length < size:
        lines = [" ".join(next(drawn) for _ in range(rng.randint(4, 9))) for _ in range(rng.randint(1, 8))]
        speeches.append(f"{rng.choice(names)}:\n" + ",\n".join(lines).capitalize() + ".\n\n")
        length += len(speeches[-1])
    path.write_text("".join(speeches)[: size - 1] + "\n")
    return path
