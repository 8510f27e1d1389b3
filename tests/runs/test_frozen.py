"""Models with tensors that no step changes, as a user trains, resumes, exports and converts them.

They are biases that correct the routers' choices of experts: a buffer in some families, a parameter without a gradient
in others. In a folder of weights that was trained they are not zero, and without them tokens go to other experts.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llmtrain.checkpoint.format import Manifest
from llmtrain.checkpoint.hf.exporting import MARK
from llmtrain.cli import main
from llmtrain.config.run import DataConfig
from llmtrain.data.stream.train_data import TrainData
from tests.helpers import forked
from tests.helpers.checkpoints import at
from tests.helpers.families import FROZEN
from tests.helpers.hf_folders import new_model
from tests.helpers.hub_server import serving
from tests.helpers.launching import losses, resumed, write_run
from tests.helpers.loaders import loader_of
from tests.helpers.plain import PlainTraining, mean_cross_entropy

FORMS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in (1, 2, 3)},
    "pp2": {"pipeline": {"stages": 2}},
    "zero3 bf16": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
}
LR, BETAS, DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0
STEPS = 4


def bias_names(tensors: Any) -> list[str]:
    return sorted(name for name in tensors if name.endswith(("correction_bias", "expert_bias")))


def pretrained(folder: Path, family: str, dtype: torch.dtype) -> Path:
    """A folder as transformers writes it, with biases that decide what some tokens get."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(FROZEN[family])
    torch.manual_seed(5)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=dtype)
    with torch.no_grad():
        for name in bias_names(state := hf.state_dict()):
            state[name].copy_(torch.randn(state[name].shape) * 0.3)
    hf.save_pretrained(folder)
    return folder


def recipe(folder: Path, data: str, form: str, model: dict[str, Any]) -> Path:
    return write_run(
        folder,
        data,
        FORMS[form],
        {"global_batch": 8, "micro_batch": 2, "max_steps": STEPS, "eval": True, "eval_sequences": 8, "export": True},
        model={**model, "attention": "eager"},
        optim={"lr": LR, "betas": list(BETAS), "weight_decay": DECAY, "clip_norm": CLIP},
        schedule={"name": "constant", "warmup_steps": 0},
        checkpoint={"every_steps": 2},
    )


def plain_losses(folder: Path, data: str) -> list[float]:
    """Of the same training by transformers and torch, one process, fp32."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    training = PlainTraining(hf, lr=LR, betas=BETAS, decay=DECAY, clip=CLIP)
    given = TrainData(DataConfig(path=data, sequence_length=32))
    with loader_of(given, global_batch=8, micro_batch=8, accumulation=1, rank=0, data_parallel=1) as loader:
        for _ in range(STEPS):
            (micro,) = next(loader).micro_batches
            logits = hf(input_ids=micro.inputs, use_cache=False).logits
            training.step(mean_cross_entropy(logits, micro.labels))
    return training.losses


def raw(folder: Path) -> dict[str, bytes]:
    """Bytes of the biases, by their names in the files, with the type before them."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in bias_names(tensors.keys()):
                value = tensors.get_tensor(name)
                found[name] = f"{value.dtype} ".encode() + value.view(torch.uint8).numpy().tobytes()
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MARK}


@pytest.mark.parametrize(("family", "form"), [("ernie4_5_moe", "zero3 bf16"), ("deepseek_v3", "pp2")])
def test_what_does_not_train_is_kept_from_a_pretrained_folder_to_the_export(small_data, tmp_path, family, form):
    bf16 = "bf16" in form
    folder = pretrained(tmp_path / "hf", family, torch.bfloat16 if bf16 else torch.float32)
    path = recipe(tmp_path / "a", small_data, form, {"pretrained": str(folder)})
    forked.train(path, "--train.max_steps", "2")
    forked.train(path)
    assert resumed(tmp_path / "a/run") == [2]
    export = tmp_path / "a" / "run" / "export"
    expected = {name: load_file(folder / "model.safetensors")[name] for name in raw(folder)}
    assert expected and all(value.abs().max() > 0.05 for value in expected.values())
    written = load_file(export / "model.safetensors")
    assert all(torch.equal(written[name].float(), value.float()) for name, value in expected.items())
    assert written.keys() == load_file(folder / "model.safetensors").keys()
    assert json.loads((export / "config.json").read_text())["dtype"] == ("bfloat16" if bf16 else "float32")
    plain = plain_losses(folder, small_data)
    got = losses(tmp_path / "a" / "run")
    worst = max(abs(got[step] - loss) for step, loss in enumerate(plain, start=1))
    assert worst < (3e-2 if bf16 else 2e-5), (got, plain)

    for given in (folder, export):
        name = given.name
        assert main(["checkpoint", "from-hf", str(given), str(tmp_path / f"{name}-run")]) == 0
        step = tmp_path / f"{name}-run" / "checkpoints" / "step-00000000"
        assert main(["checkpoint", "verify", str(step)]) == 0
        assert main(["checkpoint", "to-hf", str(step), str(tmp_path / f"{name}-back")]) == 0
        assert contents(tmp_path / f"{name}-back") == contents(given)


def folder_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def test_a_run_that_freezes_leaves_those_in_their_folder_and_exports_them_byte_by_byte(small_data, tmp_path):
    """With the JSON's Lion; the second launch has another form, and finds the folder at another place."""
    folder, moved = tmp_path / "hf", tmp_path / "moved"
    model = new_model("llama", vocab_size=512, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="40KB")
    freeze = ["model.embed_tokens.*", "model.layers.0.*"]
    path = recipe(tmp_path / "a", small_data, "zero1", {"pretrained": str(folder), "freeze": freeze})
    (tmp_path / "a" / "ds.json").write_text(json.dumps({**FORMS["zero1"], "optimizer": {"type": "Lion"}}))
    assert f"which a resume reads from {folder}" in forked.train(path, "--train.max_steps", "2")
    manifest = Manifest.read(at(tmp_path / "a" / "run", 2))
    frozen = {name for name, _ in model.named_parameters() if name.startswith(("model.embed", "model.layers.0."))}
    held = {(piece.kind, piece.name) for entry in manifest.files.values() for piece in entry.pieces}
    trained = manifest.tensors.keys() - frozen
    assert len(frozen) == 10 and held == {(kind, name) for kind in ("param", "exp_avg") for name in trained}

    folder.rename(moved)
    folder.mkdir()  # as a mount leaves its point
    (tmp_path / "a" / "ds.json").write_text(json.dumps({**FORMS["zero3"], "optimizer": {"type": "Lion"}}))
    forked.train(path, "--model.pretrained", str(moved))
    assert resumed(tmp_path / "a/run") == [2]
    before, after = folder_tensors(moved), folder_tensors(tmp_path / "a" / "run" / "export")
    same = {name for name, value in before.items() if after[name].dtype == value.dtype and after[name].equal(value)}
    assert after.keys() == before.keys() and same == frozen
    assert main(["checkpoint", "verify", str(at(tmp_path / "a" / "run", STEPS))]) == 0


def on_own_hosts(url: str, caches: list[str], rank: int) -> None:
    """A rank finds its Hub and its cache, as on a host of its own."""
    from huggingface_hub import constants

    os.environ.pop("HF_TOKEN", None)
    constants.ENDPOINT, constants.HF_HUB_DISABLE_XET = url, True
    constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_CACHE = caches[rank % len(caches)]


def test_a_base_on_the_hub_is_fetched_once_a_host_and_stays_at_its_commit(small_data, tmp_path, monkeypatch):
    """The Hub's main moves; two other hosts, with caches of their own, go on with what it was."""
    model = new_model("llama", vocab_size=512, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    freeze = {"pretrained": "org/base", "freeze": ["model.embed_tokens.*", "model.layers.0.*"]}
    path = recipe(tmp_path / "a", small_data, "zero1", freeze)
    run, home = tmp_path / "a" / "run", tmp_path / "home"
    with serving() as hub:
        commit = hub.add("models/org/base", tmp_path / "hf")
        one_host = partial(on_own_hosts, hub.url, [str(home)])
        code, output = forked.finish(path, "--train.max_steps", "2", before=one_host)
        assert code == 0 and f"it is taken from {hub.url}: commit {commit} (main)" in output, output
        assert hub.count("GET /api/models/org/base") == 2, "the commit of main, then its files"
        assert yaml.safe_load((run / "config.yaml").read_text())["model"]["revision"] == commit

        new_model("llama", vocab_size=512, num_hidden_layers=3).save_pretrained(tmp_path / "newer")
        hub.add("models/org/base", tmp_path / "newer")
        shutil.rmtree(home)
        caches = [str(tmp_path / "one"), str(tmp_path / "two")]
        code, output = forked.finish(path, before=partial(on_own_hosts, hub.url, caches))
        assert code == 0 and resumed(run) == [2] and f"commit {commit} " in output, output
        assert hub.count("GET /api/models/org/base") == 6, "the same on each host"
    before, after = folder_tensors(tmp_path / "hf"), folder_tensors(run / "export")
    frozen = {name for name, value in before.items() if after[name].dtype == value.dtype and after[name].equal(value)}
    assert after.keys() == before.keys() and len(frozen) == 10
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", caches[1])
    shutil.rmtree(caches[0])  # where rank 0, which wrote the manifest, had it
    assert main(["checkpoint", "verify", str(at(run, STEPS))]) == 0


def test_a_folder_without_its_biases_is_refused_before_training(small_data, tmp_path, capsys):
    folder = pretrained(tmp_path / "hf", "glm4_moe", torch.float32)
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.endswith("bias")}, folder / "model.safetensors")
    assert main(["checkpoint", "from-hf", str(folder), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert f"{folder}" in said and "3 tensors" in said, said
    code, said = forked.finish(recipe(tmp_path / "a", small_data, "zero2", {"pretrained": str(folder)}))
    assert code == 2 and "model.pretrained" in said and "3 tensors" in said and "Traceback" not in said, said


def test_a_family_that_keeps_integers_with_its_weights_is_refused_before_training(small_data, tmp_path):
    fields = {"model_type": "deepseek_v4", "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2}
    code, said = forked.finish(recipe(tmp_path / "a", small_data, "zero2", {"config": fields}), world_size=1)
    assert code == 2 and "tid2eid (int64)" in said and "Traceback" not in said, said
