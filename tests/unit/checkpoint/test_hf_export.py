"""to-hf: what transformers itself would write, from any checkpoint; restarts, refusals, and proofs that bite."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llmtrain.checkpoint.format import MANIFEST, Manifest, hash_file
from llmtrain.checkpoint.hf import exporting, proofs
from llmtrain.checkpoint.hf.beside import MARK
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.hf.importing import import_hf
from llmtrain.checkpoint.hf.proofs import ProofError, Report, prove_logits
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.config.run import ModelConfig
from llmtrain.errors import CheckpointError, ModelError
from llmtrain.models.build import load_config, skeleton
from llmtrain.models.layout import FolderLayout
from llmtrain.models.source import SafetensorsSource
from tests.helpers.hf_folders import checkpoint_of, model_folder, new_model


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_files_are_those_of_save_pretrained(tmp_path, family, tied):
    """One file and many; the experts of a layer stay in one file, as transformers keeps them."""
    model = new_model(family, tied=tied)
    checkpoint = checkpoint_of(model, tmp_path / "run")
    model.bfloat16()
    for limit in (10**9, 15_000):
        out, want = tmp_path / f"out{limit}", tmp_path / f"want{limit}"
        export_hf(checkpoint, out, max_shard_bytes=limit)
        model.save_pretrained(want, max_shard_size=limit)
        files = {p.name for p in want.iterdir()}
        assert {p.name for p in out.iterdir()} == files | {MARK}
        for name in files - {"generation_config.json"}:
            assert (out / name).read_bytes() == (want / name).read_bytes(), name


def test_a_value_that_fp16_cannot_hold_is_refused_by_name(tmp_path):
    model = new_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = 1e5
    checkpoint = checkpoint_of(model, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight holds 100000, which float16"):
        export_hf(checkpoint, tmp_path / "out", "fp16")
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]
    export_hf(checkpoint, tmp_path / "out", "bf16")


def test_damage_in_the_source_is_found_as_it_passes(tmp_path):
    """One flipped bit of a parameter, also where nothing is proved afterwards."""
    checkpoint = checkpoint_of(new_model("mixtral"), tmp_path / "run")
    rank_file = checkpoint / "rank-00000.safetensors"
    with open(rank_file, "r+b") as file:
        (header,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(header))["param/model.layers.1.mlp.experts.down_proj"]
        file.seek(8 + header + entry["data_offsets"][0] + 4001)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj are not those that were saved.*rank-00000"
    ):
        export_hf(checkpoint, tmp_path / "out", check="none")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.tmp").exists()
    (checkpoint / "trainer.json").write_text(
        (checkpoint / "trainer.json").read_text().replace('"step": 7', '"step": 8')
    )
    with pytest.raises(CheckpointError, match=r"trainer\.json is damaged"):
        export_hf(checkpoint, tmp_path / "out")


def test_rows_beyond_the_vocabulary_are_removed(tmp_path):
    model = new_model("llama")
    want = {name: value.detach().clone() for name, value in model.named_parameters()}
    config = model.config.to_dict()
    model.resize_token_embeddings(128)
    model.config.vocab_size = config["vocab_size"]
    checkpoint = checkpoint_of(model, tmp_path / "run", "fp32")
    report = export_hf(checkpoint, tmp_path / "out")
    assert "32 rows beyond the vocabulary removed from model.embed_tokens.weight" in "\n".join(report.lines)
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_a_kill_between_two_files_costs_the_open_one_only(tmp_path, monkeypatch):
    checkpoint = checkpoint_of(new_model("llama"), tmp_path / "run")
    begun = []
    stream = exporting.stream_tensors

    def killed(path, *args, **kwargs):
        begun.append(path.name)
        if len(begun) == 3:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        return stream(path, *args, **kwargs)

    monkeypatch.setattr(exporting, "stream_tensors", killed)
    with pytest.raises(KeyboardInterrupt):
        export_hf(checkpoint, tmp_path / "out", max_shard_bytes=12_000)
    assert not (tmp_path / "out").exists()
    first = list(begun)
    report = export_hf(checkpoint, tmp_path / "out", max_shard_bytes=12_000)
    assert begun[3] == first[2] and len(begun) == len(list((tmp_path / "out").glob("*.safetensors"))) + 1
    assert any("round trip" in line for line in report.lines)
    assert not (tmp_path / "out.tmp").exists()


def test_only_an_export_of_the_same_run_is_replaced(tmp_path):
    old, new = new_model("llama"), new_model("llama")
    new.lm_head.weight.data += 1
    run = tmp_path / "run"
    first, second = checkpoint_of(old, run, step=7), checkpoint_of(new, run, step=8)
    other = checkpoint_of(old, tmp_path / "other")
    out = tmp_path / "out"
    export_hf(first, out, check="none")
    with pytest.raises(CheckpointError, match="no earlier export of this run"):
        export_hf(other, out)
    export_hf(second, out, check="none")
    assert json.loads((out / MARK).read_text())["step"] == 8
    assert torch.equal(load_file(out / "model.safetensors")["lm_head.weight"], new.lm_head.weight.bfloat16())
    hub = model_folder(tmp_path / "hub", old)
    with pytest.raises(CheckpointError, match="no earlier export of this run"):
        export_hf(second, hub)
    model_folder(run / "export", old)  # as earlier versions left it: without a mark, in the run's own folder
    export_hf(second, run / "export", check="none")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hub", "other", "out", "run"]
    assert sorted(p.name for p in run.iterdir()) == ["checkpoints", "export"]


def layout_of(model: Any) -> FolderLayout:
    return FolderLayout(skeleton(load_config(ModelConfig(config=model.config.to_dict(), attention="eager"))))


def swapped(folder: Path, a: str, b: str) -> None:
    """Exchange two tensors of one shape in the weight file."""
    tensors = load_file(folder / "model.safetensors")
    assert tensors[a].shape == tensors[b].shape
    tensors[a], tensors[b] = tensors[b], tensors[a]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"),
        ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"),
        ("model.embed_tokens.weight", "lm_head.weight"),
    ],
)
def test_a_tensor_of_the_right_shape_under_a_wrong_name(tmp_path, monkeypatch, a, b):
    """Caught twice: by the values that are read back, and, were names themselves confused, by the logits alone."""
    model = new_model("llama", num_key_value_heads=4)
    checkpoint = checkpoint_of(model, tmp_path / "run")
    write = exporting.write_others

    def write_and_swap(folder, *args):
        write(folder, *args)
        swapped(folder, a, b)

    monkeypatch.setattr(exporting, "write_others", write_and_swap)
    with pytest.raises(ProofError, match=r"2 of 21 parameters differ from the source, first model\.") as caught:
        export_hf(checkpoint, tmp_path / "out")
    assert caught.value.exit_code == 1
    monkeypatch.setattr(exporting, "read_back", lambda values, layout, expected, what: {})
    with pytest.raises(ProofError, match="a tensor stands under a wrong name"):
        export_hf(checkpoint, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_tied_weight_that_is_written_twice_or_reshaped_is_seen(tmp_path, monkeypatch):
    checkpoint = checkpoint_of(new_model("llama", tied=True), tmp_path / "run")
    write = exporting.write_others
    embedding = "model.embed_tokens.weight"
    for says, change in (
        (r"lm_head\.weight is there and should not be", lambda old: {"lm_head.weight": old[embedding].clone()}),
        (r"embed_tokens\.weight has shape \[32, 96\]", lambda old: {embedding: old[embedding].reshape(32, 96)}),
    ):

        def write_and_change(folder, *args, change=change):
            write(folder, *args)
            tensors = load_file(folder / "model.safetensors")
            save_file({**tensors, **change(tensors)}, folder / "model.safetensors")

        monkeypatch.setattr(exporting, "write_others", write_and_change)
        with pytest.raises(ProofError, match=says):
            export_hf(checkpoint, tmp_path / "out")


def test_two_layers_in_the_wrong_order_and_two_experts(tmp_path):
    """The logits alone, of the smallest differences that there are: a fresh model's."""
    model = new_model("mixtral")
    reader = CheckpointReader(checkpoint_of(model, tmp_path / "run", "fp32"))
    for a, b in ((".experts.1.", ".experts.2."), (".layers.0.", ".layers.1.")):
        folder = model_folder(tmp_path / a, model)
        tensors = load_file(folder / "model.safetensors")
        turned = {name.replace(a, "#").replace(b, a).replace("#", b): value for name, value in tensors.items()}
        save_file(turned, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ProofError, match="wrong name"):
            prove_logits(
                layout_of(model),
                reader.read,
                folder,
                "logits",
                Report(folder),
                dtypes={torch.float32},
                trust_remote_code=False,
            )


@pytest.mark.parametrize(
    ("family", "name", "value", "says"),
    [
        ("llama", "model.layers.1.self_attn.o_proj.weight", 0.0, r"o_proj\.weight \[32, 32\] is 0 everywhere"),
        ("llama", "model.norm.weight", float("nan"), r"model\.norm\.weight holds NaN or infinity"),
    ],
)
def test_a_tensor_that_cannot_be_right(tmp_path, family, name, value, says):
    model = new_model(family)
    model.get_parameter(name).data.fill_(value)
    checkpoint = checkpoint_of(model, tmp_path / "run")
    with pytest.raises(ProofError, match=says + ".*--check none"):
        export_hf(checkpoint, tmp_path / "out")
    with pytest.raises(ProofError, match=says):
        import_hf(model_folder(tmp_path / "hf", model), tmp_path / "in")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "run"]
    export_hf(checkpoint, tmp_path / "out", check="none")


def test_one_dead_expert_is_seen_and_a_new_models_ones_are_not(tmp_path):
    model = new_model("mixtral")
    model.model.layers[1].mlp.experts.down_proj.data[2] = 0.5
    with pytest.raises(ProofError, match=r"layers\.1\.block_sparse_moe\.experts\.2\.w2\.weight .* is 0.5 everywhere"):
        export_hf(checkpoint_of(model, tmp_path / "run"), tmp_path / "out")
    report = export_hf(checkpoint_of(new_model("gpt_neox"), tmp_path / "new"), tmp_path / "out")
    assert "of 0 everywhere" in "\n".join(report.lines) and "of 1 everywhere" in "\n".join(report.lines)


def test_logits_are_left_out_where_memory_is_short_unless_asked_for(tmp_path, monkeypatch):
    checkpoint = checkpoint_of(new_model("llama"), tmp_path / "run")
    monkeypatch.setattr(proofs, "memory_available", lambda: 1 << 20)
    report = export_hf(checkpoint, tmp_path / "auto")
    assert any(line.startswith("logits") and "not compared" in line for line in report.lines)
    report = export_hf(checkpoint, tmp_path / "logits", check="logits")
    assert any(line.startswith("logits") and "agree" in line for line in report.lines)


def test_a_checkpoint_of_another_configuration(tmp_path):
    model = new_model("llama")
    model.config.num_hidden_layers = 3
    with pytest.raises(CheckpointError, match=r"it lacks 9 parameters \(model\.layers\.2"):
        export_hf(checkpoint_of(model, tmp_path / "run"), tmp_path / "out")
    model.config.num_hidden_layers, model.config.intermediate_size = 2, 64
    with pytest.raises(CheckpointError, match=r"mlp\.\w+\.weight has shape \[.*\], its configuration makes it"):
        export_hf(checkpoint_of(model, tmp_path / "run2"), tmp_path / "out")


def test_fused_parameters_are_read_in_slices_of_their_files(tmp_path):
    """`model.pretrained` of an MoE: any slice of a fused parameter, from the experts that it touches and no others."""
    folder = model_folder(tmp_path / "hf", new_model("qwen3_moe", dtype=torch.bfloat16), "20KB")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    layout = layout_of(loaded)
    source = SafetensorsSource(folder, layout)
    assert set(source.order()) == {name for name, _ in loaded.named_parameters()}
    for name, parameter in loaded.named_parameters():
        flat = parameter.detach().reshape(-1)
        assert source.shape(name) == tuple(parameter.shape)
        for start, stop in ((0, flat.numel()), (flat.numel() // 3, flat.numel() // 3 + 5), (1, flat.numel() - 1)):
            assert torch.equal(source.read(name, start, stop), flat[start:stop]), (name, start)
    touched = []
    source.read_tensor = lambda tensor, *args: (
        touched.append(tensor) or SafetensorsSource.read_tensor(source, tensor, *args)
    )
    source.read("model.layers.0.mlp.experts.gate_up_proj", 2 * 1024 + 100, 2 * 1024 + 600)
    assert touched == [f"model.layers.0.mlp.experts.2.{part}_proj.weight" for part in ("gate", "up")]


def test_an_only_expert_comes_back_with_its_own_shape(tmp_path):
    """Its file's tensor [in, out] is the whole parameter [1, in, out]: a mixture of one is Hunyuan's default."""
    source = new_model("qwen3_moe", num_experts=1, num_experts_per_tok=1)
    report = export_hf(checkpoint_of(source, tmp_path / "run", "fp32"), tmp_path / "out", check="logits")
    assert any("round trip" in line for line in report.lines)
    layout = layout_of(source)
    with contextlib.closing(SafetensorsSource(tmp_path / "out", layout)) as folder:
        assert {name: folder.shape(name) for name in folder.order()} == layout.shapes


def test_a_model_whose_files_cannot_be_followed_is_refused_by_name():
    tiny = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 96}
    with pytest.raises(
        ModelError, match=r"HrmText\w+: transformers makes the file's model\.\S+ in a way that is no cut"
    ):
        FolderLayout(skeleton(load_config(ModelConfig(config={"model_type": "hrm_text", **tiny}))))


def test_the_manifest_of_an_export_says_what_it_was_made_from(tmp_path):
    checkpoint = checkpoint_of(new_model("llama"), tmp_path / "run")
    export_hf(checkpoint, tmp_path / "out", check="none")
    mark = json.loads((tmp_path / "out" / MARK).read_text())
    assert mark == {
        "run": "run",
        "checkpoint": str(checkpoint),
        "step": Manifest.read(checkpoint).step,
        "manifest": hash_file(checkpoint / MANIFEST),
    }
