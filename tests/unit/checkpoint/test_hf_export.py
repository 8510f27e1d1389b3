"""to-hf: what transformers itself would write, from any checkpoint; restarts, refusals, and proofs that bite."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import re
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.base.errors import CheckpointError, ModelError
from llmtrain.checkpoint.hf import exporting, proofs
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.hf.folder_files import MARK
from llmtrain.checkpoint.hf.from_hf import import_hf
from llmtrain.checkpoint.hf.proofs import ProofError
from llmtrain.checkpoint.hf.serving import sampling_defaults
from llmtrain.config.run import ModelConfig
from llmtrain.models.layout import FolderLayout
from llmtrain.models.skeleton import load_config, skeleton
from llmtrain.models.source import SafetensorsSource
from tests.helpers.hf_folders import LLAMA, checkpoint_of, model_folder, new_model


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
        for name in files - {"generation_config.json", "config.json"}:
            assert (out / name).read_bytes() == (want / name).read_bytes(), name
        ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (out, want))
        older = {"rope_theta": theirs["rope_parameters"]["rope_theta"]}
        if family == "gpt_neox":
            older |= {"rotary_emb_base": 1e4, "rotary_pct": 0.25, "partial_rotary_factor": 0.25}
        assert ours == {**theirs, **older}


_LONG = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 4.0, 8.0, 16.0]}
_LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
ROPES = {
    "llama": {"rope_theta": 5e5},
    "llama scaled": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **_LLAMA_3}},
    "qwen2": {
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "qwen3": {
        "rope_theta": 1e6,
        "original_max_position_embeddings": 16,
        "rope_scaling": {"rope_type": "longrope", "factor": 2.0, "attention_factor": 1.5, **_LONG},
    },
    "mistral": {"rope_theta": 1e6, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "olmo2": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "gpt_neox": {"rotary_emb_base": 2e4, "rotary_pct": 0.5},
    "phi3": {"original_max_position_embeddings": 16, "rope_scaling": {"type": "longrope", **_LONG}},
    "gemma3_text": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "glm": {"rope_theta": 2e4, "partial_rotary_factor": 0.25},
    "modernbert-decoder": {"global_rope_theta": 1e5, "local_rope_theta": 2e4},
}
"""Families with the fields by which transformers 4 says where its rotary embedding differs from the family's."""


def _model_of(case: str, **changed: Any) -> Any:
    family, fields = case.split()[0], ROPES[case] | changed
    more = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3_text" else {}
    sizes = {**LLAMA, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 1, "initializer_range": 0.2, **more}
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **copy.deepcopy(fields)})).eval()


@pytest.mark.parametrize("case", ROPES)
def test_an_export_says_its_rotary_base_and_scaling_to_transformers_4(tmp_path, case):
    """Transformers 4 does not know `rope_parameters` and would silently compute with the family's own base."""
    model, fields, out = _model_of(case), ROPES[case], tmp_path / "out"
    export_hf(checkpoint_of(model, tmp_path / "run"), out)  # transformers 5 has compared the logits
    told = json.loads((out / "config.json").read_text())
    scaling, wanted = told.pop("rope_scaling", {}), dict(fields)
    for key, value in wanted.pop("rope_scaling", {}).items():
        assert scaling[key] == value, key
    assert scaling.keys() == fields.get("rope_scaling", {}).keys() or case not in ("phi3", "olmo2"), "refused there"
    assert {key: told.get(key) for key in wanted} == wanted
    assert AutoConfig.from_pretrained(out).rope_parameters == model.config.rope_parameters


# transformers 4.57.3 reads global_rope_theta alone, for both of this family's kinds of layers.
_ONE_BASE = {"modernbert-decoder": {"local_rope_theta": 1e5}}
_READ_BY_4 = """
import sys, torch
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    ids, wanted = torch.load(folder + ".pt")
    got = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()(ids, use_cache=False).logits
    print(folder, float((got - wanted).abs().max() / wanted.abs().max()))
"""


@pytest.mark.slow
def test_transformers_4_computes_the_logits_of_an_export(tmp_path):
    """In an environment of its own. Skipped by name where the registry does not give it."""
    old, own = tmp_path / "old", sysconfig.get_paths()["purelib"]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", old], check=True)
    wanted = ["transformers==4.57.3", "huggingface_hub==0.36.2", "tokenizers==0.22.2"]
    if importlib.util.find_spec("pip") is None:
        pytest.skip("no pip here: transformers 4 is not asked")
    site = next(old.glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, *wanted]
    if subprocess.run(pip, capture_output=True).returncode:
        pytest.skip("the registry does not give transformers 4.57.3: it is not asked")
    (site / "others.pth").write_text(own + "\n")
    ids = torch.randint(0, 96, (1, 48), generator=torch.Generator().manual_seed(0))
    for number, case in enumerate(ROPES):
        model = _model_of(case, **_ONE_BASE.get(case, {}))
        export_hf(checkpoint_of(model, tmp_path / f"run{number}", "fp32"), tmp_path / f"out{number}")
        with torch.no_grad():
            torch.save((ids, model(ids, use_cache=False).logits), tmp_path / f"out{number}.pt")
    folders = [str(tmp_path / f"out{number}") for number in range(len(ROPES))]
    read = subprocess.run([old / "bin/python", "-c", _READ_BY_4, *folders], capture_output=True, text=True)
    assert read.returncode == 0, read.stderr[-2000:]
    # Two versions of a family's code, both in fp32; another base moves them by 0.1 and more.
    differ = dict(zip(ROPES, (float(line.split()[1]) for line in read.stdout.splitlines()), strict=True))
    assert max(differ.values()) < 1e-4, differ


def test_the_sampling_defaults_of_the_base_stay_in_the_export(tmp_path):
    """The export has them from the checkpoint, without the base's token ids."""
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    base = model_folder(tmp_path / "base", new_model("llama"))
    others = {"eos_token_id": 77, "bad_words_ids": [[3]], "_from_model_config": True, "transformers_version": "4.40.0"}
    (base / "generation_config.json").write_text(json.dumps(sampling | others))
    export_hf(checkpoint_of(new_model("llama"), tmp_path / "run", sampling=sampling_defaults(base)), tmp_path / "out")
    told = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert told == {**sampling, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}


def test_a_padding_token_that_the_model_has_no_row_for_is_left_out(tmp_path):
    """Folders name -1, which a server takes for the last word."""
    model = new_model("llama")
    model.config.pad_token_id = pad = -1
    report = export_hf(checkpoint_of(model, tmp_path / "run"), tmp_path / "out", check="none")
    assert f"pad_token_id {pad} left out: the model's tokens are 0 to 95" in "\n".join(report.lines)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"] is None


def test_a_value_that_fp16_cannot_hold_is_refused_by_name(tmp_path):
    model = new_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = 1e5
    checkpoint = checkpoint_of(model, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"(?s)layers\.1\.mlp\.up_proj\.weight.*100000"):
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
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj"):
        export_hf(checkpoint, tmp_path / "out", check="none")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.tmp").exists()
    (checkpoint / "trainer.json").write_text(
        (checkpoint / "trainer.json").read_text().replace('"step": 7', '"step": 8')
    )
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        export_hf(checkpoint, tmp_path / "out")


def test_rows_beyond_the_vocabulary_are_removed(tmp_path):
    model = new_model("llama")
    want = {name: value.detach().clone() for name, value in model.named_parameters()}
    config = model.config.to_dict()
    model.resize_token_embeddings(128)
    model.config.vocab_size = config["vocab_size"]
    checkpoint = checkpoint_of(model, tmp_path / "run", "fp32")
    report = export_hf(checkpoint, tmp_path / "out")
    assert any("32 rows" in line and "model.embed_tokens.weight" in line for line in report.lines)
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
    with pytest.raises(CheckpointError, match=rf"{out}.* export"):
        export_hf(other, out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes.txt"):
        export_hf(second, out)
    (out / "notes.txt").unlink()
    assert "step 7" in "".join(export_hf(second, out, check="none").lines)
    assert json.loads((out / MARK).read_text())["step"] == 8
    assert torch.equal(load_file(out / "model.safetensors")["lm_head.weight"], new.lm_head.weight.bfloat16())
    hub = model_folder(tmp_path / "hub", old)
    with pytest.raises(CheckpointError, match=rf"{hub}.* export"):
        export_hf(second, hub)
    model_folder(run / "export", old)  # without a mark, in the run's own folder
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
    with pytest.raises(ProofError, match=r"2 of 21 parameters.*model\.") as caught:
        export_hf(checkpoint, tmp_path / "out")
    assert caught.value.exit_code == 1
    monkeypatch.setattr(exporting, "read_back", lambda values, layout, expected, what: {})
    with pytest.raises(ProofError, match=" name"):
        export_hf(checkpoint, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_tied_weight_that_is_written_twice_or_reshaped_is_seen(tmp_path, monkeypatch):
    checkpoint = checkpoint_of(new_model("llama", tied=True), tmp_path / "run")
    write = exporting.write_others
    embedding = "model.embed_tokens.weight"
    for says, change in (
        (r"lm_head\.weight is missing or superfluous", lambda old: {"lm_head.weight": old[embedding].clone()}),
        (r"embed_tokens\.weight has the shape \[32, 96\]", lambda old: {embedding: old[embedding].reshape(32, 96)}),
    ):

        def write_and_change(folder, *args, change=change):
            write(folder, *args)
            tensors = load_file(folder / "model.safetensors")
            save_file({**tensors, **change(tensors)}, folder / "model.safetensors")

        monkeypatch.setattr(exporting, "write_others", write_and_change)
        with pytest.raises(ProofError, match=says):
            export_hf(checkpoint, tmp_path / "out")


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
    with pytest.raises(ProofError, match=r"(?s)layers\.1\.block_sparse_moe\.experts\.2\.w2\.weight.*0.5"):
        export_hf(checkpoint_of(model, tmp_path / "run"), tmp_path / "out")
    report = export_hf(checkpoint_of(new_model("gpt_neox"), tmp_path / "new"), tmp_path / "out")
    assert re.search(r"of 0 .*of 1 ", "\n".join(report.lines), re.DOTALL)


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
    with pytest.raises(CheckpointError, match=r"\(model\.layers\.2"):
        export_hf(checkpoint_of(model, tmp_path / "run"), tmp_path / "out")
    model.config.num_hidden_layers, model.config.intermediate_size = 2, 64
    with pytest.raises(CheckpointError, match=r"mlp\.\w+\.weight"):
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
    with pytest.raises(ModelError, match=r"HrmText\w+: .*model\.\S+"):
        FolderLayout(skeleton(load_config(ModelConfig(config={"model_type": "hrm_text", **tiny}))))
