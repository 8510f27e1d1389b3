"""Each kind of row: a folder of it has the bytes that it has always had."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash

from llmtrain.base.errors import DataError
from llmtrain.commands.prepare import main
from llmtrain.config.run import DataConfig
from llmtrain.data.kinds import RowKind
from llmtrain.data.sequences import IGNORED
from llmtrain.data.shards import PreparedSet
from llmtrain.data.stream.train_data import TrainData
from tests.helpers.chat import KINDS, workers_here, write_tokenizer
from tests.helpers.preference import preferences, unpaired
from tests.helpers.questions import questions

TALKS = [
    {
        "messages": [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["chosen"]}]
        * (1 + index % 2)
    }
    for index, record in enumerate(preferences(40))
]
IDS = [[(7 * at + row) % 200 for at in range(5 + row % 9)] for row in range(40)]

RECORDS: dict[str, list[dict[str, Any]]] = {
    "auto": [{"text": f"{record['prompt']}. {record['chosen']}"} for record in preferences(40)],
    "tokens": [{"input_ids": ids} for ids in IDS],
    "token-rows": [{"input_ids": ids, "loss_mask": [at % 3 > 0 for at in range(len(ids))]} for ids in IDS],
    "chat": TALKS,
    "preference": preferences(40),
    "unpaired": unpaired(30),
    "prompt": [{"prompt": record["prompt"]} for record in preferences(40)],
    "choices": questions(),
}
OPTIONS = {
    "chat": ("--max-tokens", "80", "--too-long", "split"),
    "preference": ("--max-tokens", "150", "--max-rejected", "9"),
}
DIGESTS = Path(__file__).parents[2] / "data/prepared_folders.json"


def digests_of(folder: Path) -> dict[str, str]:
    """Digest of each file; of the manifest without times and without what other libraries write."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for key in ("tokenizer_fingerprint", "data_fingerprint"):
        del manifest[key]
    del manifest["source"]["stat"], manifest["settings"]["tokenizer"]
    for shard in (shard for shards in manifest["shards"].values() for shard in shards):
        del shard["origins"]
    contents = {
        path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in (".bin", ".rows", ".jsonl")
    }
    contents["manifest.json"] = json.dumps(manifest, indent=1).encode()
    return {name: xxhash.xxh3_128_hexdigest(content) for name, content in sorted(contents.items())}


def prepared(form: str, place: Path) -> Path:
    write_tokenizer(place / "tokenizer", KINDS["chatml"])
    (place / "source.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS[form]))
    words = ["--source", "source.jsonl", "--tokenizer", "tokenizer", "--format", form, "--out", "out"]
    with workers_here():
        assert main([*words, *OPTIONS.get(form, ())]) == 0
    return place / "out"


@pytest.mark.parametrize("form", RECORDS)
def test_a_folder_has_the_bytes_that_it_has_always_had(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert digests_of(prepared(form, tmp_path)) == json.loads(DIGESTS.read_text())[form]


@pytest.mark.parametrize(("form", "together"), [("chat", 1), ("token-rows", 1), ("preference", 2), ("unpaired", 1)])
def test_without_packing_a_sequence_is_a_record(
    form: str, together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counted labels are those of the packed sequences, and the order is another one for a resume."""
    monkeypatch.chdir(tmp_path)
    folder = str(prepared(form, tmp_path))
    packed, apart = (
        TrainData(DataConfig(path=folder, sequence_length=200, isolate_documents=True, pack=pack))
        for pack in (True, False)
    )
    rows = PreparedSet(folder).split("train").row_lengths()
    assert packed.sequences_per_epoch < apart.sequences_per_epoch == len(rows) // together
    assert packed.fingerprint != apart.fingerprint

    def labels(data: TrainData) -> list[int]:
        sequences = [data.sequence_at(index) for index in range(data.sequences_per_epoch)]
        return sorted(int(label) for sequence in sequences for label in sequence.labels if label != IGNORED)

    assert labels(packed) == labels(apart)
    starts = [int((apart.sequence_at(index).positions == 0).sum()) for index in range(apart.sequences_per_epoch)]
    assert set(starts) <= {together, together + 1}  # the padding begins anew, too


def test_texts_have_no_rows_to_keep_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = str(prepared("auto", tmp_path))
    with pytest.raises(DataError, match=r"data\.pack is false"):
        TrainData(DataConfig(path=folder, sequence_length=16, pack=False))


def test_a_kind_that_no_folder_asked_for_keeps_its_name() -> None:
    """A plugin's class is refused before llmtrain's own of that name is imported."""
    script = (
        "import sys; from llmtrain.data.kinds import RowKind\n"
        "assert 'llmtrain.data.kinds.prompts' not in sys.modules\n"
        "type('Mine', (RowKind,), {'__module__': 'mine'}, format='prompt')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    (error,) = re.findall(r"^ValueError: (.*)", done.stderr, re.MULTILINE)
    assert all(word in error for word in ("'prompt'", "Mine", "Prompts"))
    assert [kind.selected() for kind in RowKind.CHOICES.values()] == [*RowKind.CHOICES]
