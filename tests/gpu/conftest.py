"""The forms of training that need CUDA. LLMTRAIN_GPU_TESTS_ON_CPU=1 runs what of them a CPU can compute."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

ON_CPU = os.environ.get("LLMTRAIN_GPU_TESTS_ON_CPU") == "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    import torch

    if not torch.cuda.is_available() and not ON_CPU:
        pytest.skip(
            "no CUDA device" if os.environ.get("DS_ACCELERATOR") != "cpu" else "`make gpu-check` runs tests/gpu"
        )


@pytest.fixture
def cuda() -> None:
    """For what only CUDA has."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, and a CPU has nothing of the kind")


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A prepared folder of documents of unequal length, vocabulary 512; needs neither pyarrow nor a tokenizer."""
    from tests.helpers.prepared import write_prepared

    rng = random.Random(0)
    # Half of the ids follow from the one before: there is something to learn.
    documents = []
    for _ in range(160):
        ids = [rng.randrange(1, 512)]
        for _ in range(rng.randint(20, 300)):
            ids.append(ids[-1] * 7 % 511 + 1 if rng.random() < 0.5 else rng.randrange(1, 512))
        documents.append(ids)
    folder: Path = tmp_path_factory.mktemp("data") / "prepared"
    vocabulary = {f"w{number}": number for number in range(512)}
    tokenizer = json.dumps(
        {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}}
    )
    return str(write_prepared(folder, [documents], [documents[:8]], vocab_size=512, tokenizer=tokenizer))
