"""Folders that lie: paths that leave them, headers and indexes that disagree, pickles, code. Nothing is left behind."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmtrain.base.errors import ModelError, UserError
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.hf.from_hf import import_hf
from llmtrain.storage.tensorfile import header_bytes
from tests.helpers.hf_folders import model_folder, new_model

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of several shards."""
    return model_folder(tmp_path_factory.mktemp("hf") / "whole", new_model("llama"), "20KB")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "hf"
    copy.mkdir()
    for file in whole.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def refused(folder: Path, says: str) -> None:
    """import_hf says so, and leaves nothing."""
    out = folder.parent / "out"
    with pytest.raises(UserError, match=says):
        import_hf(folder, out)
    assert not out.exists() and not out.with_name("out.tmp").exists()


def edit(path: Path, change: Callable[[Any], None]) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def set_file(name: Any) -> Callable[[Any], None]:
    return lambda index: index["weight_map"].update({"model.norm.weight": name})


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/passwd", "a/../../x", "", ".", 7, None, ["x"]])
def test_an_index_that_leaves_the_folder(folder, name):
    (folder.parent / "evil.safetensors").write_bytes(shards(folder)[0].read_bytes())
    edit(folder / INDEX, set_file(name))
    refused(folder, r"from-hf: .*index\.json names .*which is no file in")


def test_an_index_that_disagrees_with_its_shards(folder):
    index = (folder / INDEX).read_text()
    edit(folder / INDEX, set_file(shards(folder)[0].name))
    refused(folder, r"index\.json puts model\.norm\.weight into model-00001.*, which does not hold it")
    (folder / INDEX).write_text(index)
    edit(folder / INDEX, lambda tree: tree["weight_map"].pop("model.norm.weight"))
    refused(folder, r"holds model\.norm\.weight, which model\.safetensors\.index\.json does not list")
    (folder / INDEX).write_text(index)
    edit(folder / INDEX, lambda tree: tree["weight_map"].update({"model.more.weight": shards(folder)[0].name}))
    refused(folder, r"puts model\.more\.weight into .*which does not hold it")
    for text in ("[]", "{", '{"weight_map": []}', '{"weight_map": {"a": {}}}', "[" * 100_000):
        (folder / INDEX).write_text(text)
        refused(folder, r"from-hf: .*index\.json")
    (folder / INDEX).write_text(index)
    (folder / "model.safetensors").write_bytes(b"stale")
    refused(folder, r"has both model\.safetensors and model\.safetensors\.index\.json")


def test_a_tensor_in_two_shards(folder):
    first, second = shards(folder)[:2]
    name = next(iter(load_file(first)))
    save_file({**load_file(second), name: load_file(first)[name]}, second)
    refused(folder, rf"{name} is in .*model-00001.* and in .*model-00002")


def test_links_that_leave_the_folder(folder):
    """A weight file, the configuration, and what would be copied beside the checkpoint and published later."""
    secret = folder.parent / "secret"
    for name in (shards(folder)[1].name, "config.json", "tokenizer.json", INDEX):
        kept = (folder / name).read_bytes()
        secret.write_bytes(kept)
        (folder / name).unlink()
        (folder / name).symlink_to(secret)
        refused(folder, rf"{name} is a link to {secret}, outside of the folder")
        (folder / name).unlink()
        (folder / name).write_bytes(kept)
    first = shards(folder)[0]
    first.rename(folder / "blob")
    first.symlink_to("blob")
    import_hf(folder, folder.parent / "out", check="none")


def test_the_links_of_the_hub_cache_are_followed(folder, tmp_path):
    """models--ORG--NAME/snapshots/REVISION/FILE -> ../../blobs/DIGEST, and nowhere else."""
    home = tmp_path / "models--org--name"
    snapshot = home / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    for index, file in enumerate(sorted(folder.iterdir())):
        file.rename(home / "blobs" / f"{index:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{index:040x}")
    import_hf(snapshot, tmp_path / "in")
    export_hf(tmp_path / "in" / "checkpoints" / "step-00000000", tmp_path / "back")
    assert not any(file.is_symlink() for file in (tmp_path / "back").iterdir())
    shared = tmp_path / "blobs" / "ab" / ("ab" * 32)  # the store that the repositories of a cache share
    shared.parent.mkdir(parents=True)
    (home / "blobs" / f"{0:040x}").rename(shared)
    (home / "blobs" / f"{0:040x}").symlink_to(os.path.relpath(shared, home / "blobs"))
    import_hf(snapshot, tmp_path / "again")
    (home / "other").write_text("{}")
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to("../../other")
    refused(snapshot, "is a link to .*other, outside of the folder")


def test_headers_that_lie(folder):
    path = shards(folder)[0]
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    name = next(key for key in header if key != "__metadata__")

    def with_header(**fields: Any) -> bytes:
        text = json.dumps({**header, name: {**header[name], **fields}}).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    lies = {
        "claims": struct.pack("<Q", 1 << 42) + data[8:],
        "cut short": data[:-5],
        "does not fill": with_header(shape=[1 << 40, 1 << 20]),
        "hole or overlap|does not fill": with_header(data_offsets=[64, 64 + 4]),
        "natural number": with_header(shape=[-1, -64]),
        "unknown type": with_header(dtype="Q4"),
        "no safetensors file": b"",
    }
    for says, lie in lies.items():
        path.write_bytes(lie)
        refused(folder, says)


def test_a_header_of_more_names_than_a_model_has_is_refused_before_they_are_looked_through(folder, monkeypatch):
    """400,000 of them took `config check` 18 CPU-seconds."""
    empty = header_bytes({f"t{index}": ("F32", (0,)) for index in range(100_001)}, {})
    for file in (*shards(folder), folder / INDEX):
        file.unlink()
    (folder / "model.safetensors").write_bytes(empty)
    monkeypatch.setattr("llmtrain.storage.tensorfile._entry", lambda *_: pytest.fail("this takes seconds"))
    refused(folder, "100001 tensors in one file, where at most 100000 are read")


def test_pickles_are_not_opened(folder):
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {folder.parent / 'pwned'}",)

    for file in (*shards(folder), folder / INDEX):
        file.unlink()
    torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
    refused(folder, "Only safetensors are read; convert .bin files first")
    assert not (folder.parent / "pwned").exists()


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({mark!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_in_a_folder_runs_only_when_it_is_trusted(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    mark = tmp_path / "code-ran"
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit(folder / "config.json", lambda tree: tree.update(model_type="own_llama", auto_map=auto_map))
    refused(folder, r"auto_map .*--trust-remote-code")
    assert not mark.exists()
    import_hf(folder, tmp_path / "run", trust_remote_code=True)
    assert mark.exists()
    mark.unlink()
    step = tmp_path / "run" / "checkpoints" / "step-00000000"
    with pytest.raises(ModelError, match="--trust-remote-code"):
        export_hf(step, tmp_path / "back")
    assert not mark.exists()
    export_hf(step, tmp_path / "back", trust_remote_code=True)
    assert (tmp_path / "back" / "own.py").read_bytes() == (folder / "own.py").read_bytes()
    for file in shards(folder):
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_hidden_layers": 3}, r"lacks 9 of the 30 parameters of LlamaForCausalLM, first model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"holds 9 tensors"),
        ({"intermediate_size": 64}, r"mlp\.\w+\.weight has the shape \[.*\], but \[.*\] by config\.json"),
        ({"tie_word_embeddings": True}, r"ties lm_head\.weight to model\.embed_tokens\.weight, but they differ"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: quantized weights are not read"),
        ({"model_type": "no_such"}, "is not a model configuration"),
        ({"hidden_size": "wide"}, "is not a model configuration|cannot build"),
        ({"num_attention_heads": 0}, "is not a model configuration|cannot build"),
    ],
)
def test_a_configuration_of_another_model(folder, fields, says):
    edit(folder / "config.json", lambda tree: tree.update(fields))
    refused(folder, says)


@pytest.mark.parametrize("text", ["", "[]", "7", "{", "null", "[" * 100_000])
def test_a_config_json_that_is_none(folder, text):
    (folder / "config.json").write_text(text)
    refused(folder, r"from-hf: .*config\.json")


def test_types_that_are_no_weights(folder):
    path = shards(folder)[0]
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name].double()}, path)
    refused(folder, rf"{name} has the type F64; it must be F32, BF16 or F16")


def test_a_part_of_a_fused_parameter_that_is_missing(tmp_path):
    folder = model_folder(tmp_path / "hf", new_model("mixtral"))
    tensors = load_file(folder / "model.safetensors")
    lost = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    save_file({name: value for name, value in tensors.items() if name != lost}, folder / "model.safetensors")
    refused(folder, rf"lacks {lost}, a part of the model's model\.layers\.1\.mlp\.experts\.gate_up_proj")
    save_file({**tensors, lost: tensors[lost][:-1].clone()}, folder / "model.safetensors")
    refused(folder, rf"{lost} has the shape \[47, 32\] instead of \[48, 32\]")
