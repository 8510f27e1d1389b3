"""Hugging Face folder -> checkpoint -> Hugging Face folder, byte by byte, for every family that we name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmtrain.base.errors import CheckpointError
from llmtrain.checkpoint import output
from llmtrain.checkpoint.format import Manifest
from llmtrain.checkpoint.hf import from_hf, proofs
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.hf.folder_files import MARK
from llmtrain.checkpoint.hf.from_hf import import_hf
from llmtrain.checkpoint.reader import CheckpointReader
from tests.helpers.hf_folders import FAMILIES, model_folder, new_model

pytestmark = pytest.mark.long

DIFFER = ("llama", "gpt2", "gpt_neox", "mixtral")
"""Plain names, transposed maps, other names in the file, and experts that the file has one by one: the ways that there
are. The others are cases of these; they are slow tests."""
STEP = Path("checkpoints") / "step-00000000"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != MARK}


def line(lines: list[str], what: str) -> str:
    return next((text for text in lines if text.startswith(what)), "")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "family", [family if family in DIFFER else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_there_and_back_is_the_same_folder(tmp_path, family, tied):
    """One shard in bf16, many in fp32; MoE and GPT-NeoX have other names in the file than in the model."""
    for dtype, shard in ((torch.bfloat16, "1GB"), (torch.float32, "20KB")):
        case = tmp_path / str(dtype)
        folder = model_folder(case / "hf", new_model(family, tied=tied, dtype=dtype), shard)
        lines = import_hf(folder, case / "run").lines
        assert "agree" in line(lines, "logits") and ("tied" in line(lines, "parameters")) == tied
        assert "the same weight files" in line(lines, "way back")
        export_hf(case / "run" / STEP, case / "back")
        assert contents(case / "back") == contents(folder)
        assert len(list(folder.glob("*.safetensors"))) == 1 or shard == "20KB"
    index = json.loads((case / "back" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3


def test_mixed_types_in_another_cut_keep_their_types(tmp_path):
    model = new_model("llama", dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float() + 1e-3
    folder = model_folder(tmp_path / "many", model, "20KB")
    import_hf(folder, tmp_path / "run")
    export_hf(tmp_path / "run" / STEP, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)
    export_hf(tmp_path / "run" / STEP, tmp_path / "one", max_shard_bytes=10**9)
    want = model_folder(tmp_path / "want", model)
    assert contents(tmp_path / "one")["model.safetensors"] == (want / "model.safetensors").read_bytes()


def test_bare_decoders_fused_names_and_old_buffers(tmp_path):
    """Files without the decoder's prefix, with the model's own names for the experts, and with buffers of old times."""
    model = new_model("mixtral", tied=True)
    want = dict(model.named_parameters())
    written = load_file(model_folder(tmp_path / "plain", model) / "model.safetensors")
    bare = {name.removeprefix("model."): value for name, value in written.items()}
    bare["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    fused = {name: value.detach() for name, value in want.items()}
    for name, tensors in (("bare", bare), ("fused", fused)):
        folder = model_folder(tmp_path / name, model)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        report = import_hf(folder, tmp_path / f"{name}-run")
        reader = CheckpointReader(tmp_path / f"{name}-run" / STEP)
        assert set(reader.order()) == set(want)
        for parameter, value in want.items():
            assert torch.equal(reader.read(parameter, 0, value.numel()), value.detach().reshape(-1)), parameter
        assert ("inv_freq" in line(report.lines, "dropped")) == (name == "bare")
    assert "model.safetensors" in line(import_hf(tmp_path / "bare", tmp_path / "x").lines, "way back")


def test_a_tied_weight_that_stands_twice_is_written_once(tmp_path):
    model = new_model("llama", tied=True)
    folder = model_folder(tmp_path / "hf", model)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert "lm_head.weight repeats" in line(import_hf(folder, tmp_path / "run").lines, "ties")
    export_hf(tmp_path / "run" / STEP, tmp_path / "back")
    assert "lm_head.weight" not in load_file(tmp_path / "back" / "model.safetensors")


def interrupted(*args, **kwargs):
    raise KeyboardInterrupt


def test_an_import_goes_on_where_it_was_killed(tmp_path, monkeypatch):
    """While it proved itself: the checkpoint is not written again, but is if the folder changed meanwhile."""
    folder = model_folder(tmp_path / "hf", new_model("llama"))
    monkeypatch.setattr(from_hf, "read_back", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            import_hf(folder, tmp_path / "run")
        assert not (tmp_path / "run").exists()
        monkeypatch.setattr(from_hf, "build_checkpoint", interrupted)
    monkeypatch.setattr(from_hf, "read_back", proofs.read_back)
    (tmp_path / "run.tmp" / "model.safetensors").write_text("of something else that was here")
    report = import_hf(folder, tmp_path / "run")
    assert "agree" in line(report.lines, "logits")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["checkpoints", "source"]
    (tmp_path / "run").rename(tmp_path / "run.tmp")
    model_folder(folder, new_model("llama"))
    with pytest.raises(KeyboardInterrupt):
        import_hf(folder, tmp_path / "run")


def test_a_full_disk_keeps_what_is_written(tmp_path, monkeypatch):
    """The message says that the same command goes on, so a restart must find its files."""
    folder = model_folder(tmp_path / "hf", new_model("llama"))
    stream, begun = output.stream_tensors, []

    def full(path, *args, **kwargs):
        if path.name == "rank-00002.safetensors":
            raise OSError(28, "No space left on device")
        return stream(path, *args, **kwargs)

    monkeypatch.setattr(output, "_FILE_BYTES", 30_000)
    monkeypatch.setattr(output, "stream_tensors", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        import_hf(folder, tmp_path / "run")
    monkeypatch.setattr(
        output, "stream_tensors", lambda path, *a, **k: begun.append(path.name) or stream(path, *a, **k)
    )
    import_hf(folder, tmp_path / "run")
    assert begun[0] == "rank-00002.safetensors"


def test_an_imported_checkpoint_stands_alone(tmp_path):
    """`ls`, a weights-only resume and to-hf use it without the folder beside it; averaged ones have none."""
    folder = model_folder(tmp_path / "hf", new_model("qwen2"))
    import_hf(folder, tmp_path / "run")
    manifest = Manifest.read(tmp_path / "run" / STEP)
    assert manifest.step == 0 and manifest.layout == {"made_by": "from-hf", "precision": "fp32"}
    (tmp_path / "moved" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / STEP).rename(tmp_path / "moved" / STEP)
    export_hf(tmp_path / "moved" / STEP, tmp_path / "back")
    back = contents(tmp_path / "back")
    assert json.loads(back["config.json"]) == json.loads((folder / "config.json").read_text())
    assert back["model.safetensors"] == (folder / "model.safetensors").read_bytes() and len(back) == 2
