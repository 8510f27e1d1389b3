"""Sites whose ranks share the model in different ways, and sites that train an adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llmtrain.checkpoint.format import complete_checkpoints
from llmtrain.checkpoint.reader import CheckpointReader
from llmtrain.config.run import DataConfig
from tests.features.sites.simulated_sites import simulated
from tests.features.sites.test_sites_runs import coordinator, far, parameters, recipe, start, synchronised
from tests.helpers.families import FAMILIES
from tests.helpers.launching import TINY, tiny_folder

pytestmark = pytest.mark.needs("peft", "torchft")

__all__ = ["coordinator"]


FORMS = [
    pytest.param({"zero_optimization": {"stage": 0}}, 2, id="ZeRO 0"),
    pytest.param({"zero_optimization": {"stage": 0}, "pipeline": {"stages": 2}}, 2, id="pipeline",
                 marks=pytest.mark.slow),
    pytest.param({"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}, 2, id="tensor",
                 marks=pytest.mark.slow),
    pytest.param({"zero_optimization": {"stage": 1}, "sequence_parallel_size": 2}, 2, id="sequence",
                 marks=pytest.mark.slow),
    *(pytest.param({"zero_optimization": {"stage": stage}, "expert_parallel": {"enabled": True, "autoep_size": 2}},
                   ranks, id=f"experts, {ranks} ranks at ZeRO {stage}", marks=pytest.mark.slow)
      for stage, ranks in ((0, 4), (1, 2), (2, 4), (3, 2))),
]  # fmt: skip


@pytest.mark.parametrize(("form", "ranks"), FORMS)
def test_a_site_of_another_form_beside_a_zero_site(form, ranks, coordinator, small_data, tmp_path):
    """Every element crosses the line once, whichever ranks of the site hold it; both end with the same bits.

    The bound is that of `test_two_sites_train_what_the_definition_says`.
    """
    both = ("--sites.start_sites", "2", "--sites.method", "local_sgd")
    model = TINY
    if "expert_parallel" in form:
        model = {**FAMILIES["qwen3_moe"], "num_hidden_layers": 2, "tie_word_embeddings": True}
    a = start(recipe(tmp_path / "A", small_data, 2, model={"config": model}), coordinator, *both, ranks=2)
    file = recipe(tmp_path / "B", small_data, model={"config": model})
    (tmp_path / "B/ds.json").write_text(json.dumps(form))
    micro = () if form == {"zero_optimization": {"stage": 0}} else ("--train.micro_batch", str(4 // max(ranks, 2)))
    b = start(file, coordinator, *both, *micro, ranks=ranks)
    codes = a.wait(120), b.wait(60)
    assert codes == ([0, 0], [0] * ranks), a.output() + b.output()
    got = parameters(tmp_path / "A")
    assert far(got, parameters(tmp_path / "B"))[0] == 0
    count = sum(each.numel() for each in got.values())
    for name in ("A", "B"):  # first: after a round that a site of a busy machine trained alone, other numbers are right
        rounds = synchronised(tmp_path / name)
        assert [event["received_bytes"] for event in rounds] == [0, *[4 * count] * 3], rounds
    setting = {"sites": 2, "batch": 4, "steps": 12, "sync_every": 4, "lr": 3e-3}
    data = DataConfig(path=small_data, sequence_length=32)
    largest, mean = far(got, simulated(model, data, **setting, outer_lr=None))
    assert largest < 1e-4 and mean < 1e-6, (largest, mean, rounds)


def adapted(folder: Path, data: str, base: Path) -> Path:
    return recipe(folder, data, model={"pretrained": str(base)}, adapter={"r": 4})


@pytest.mark.slow
def test_an_adapter_alone_travels_and_another_base_is_refused(coordinator, small_data, tmp_path):
    """Uncompressed, in fewer bytes than the model has elements; a resume goes on; another base is named."""
    base, other = (tiny_folder(tmp_path / name, seed) for seed, name in enumerate(("base", "other")))
    both = ("--sites.start_sites", "2")
    sites = [tmp_path / name for name in ("A", "B")]
    for steps in ("8", "12"):
        files = [each / "recipe.yaml" if steps == "12" else adapted(each, small_data, base) for each in sites]
        jobs = [
            start(file, coordinator, *both, "--train.max_steps", steps, ranks=n + 1) for n, file in enumerate(files)
        ]
        assert [job.wait(90) for job in jobs] == [[0], [0, 0]], jobs[0].output() + jobs[1].output()
    trained = [CheckpointReader(complete_checkpoints(each / "run/checkpoints")[0]) for each in sites]
    names = [name for name in trained[0].order() if "lora" in name]
    values = [torch.cat([r.read(n, 0, torch.Size(r.shape(n)).numel()).flatten() for n in names]) for r in trained]
    assert names and torch.equal(*values) and values[0].any()
    model = sum(each.numel() for each in base_values(base))
    received = [event["received_bytes"] for event in synchronised(tmp_path / "A")]
    assert set(received) == {0, 4 * values[0].numel()} and 4 * values[0].numel() < model, (received, model)
    for reader in trained:
        reader.close()
    files = [adapted(tmp_path / "C", small_data, base), adapted(tmp_path / "D", small_data, other)]
    jobs = [start(file, coordinator, *both) for file in files]
    assert [job.wait(90) for job in jobs] == [[2], [2]]
    assert "(model.pretrained)" in jobs[0].output()


def base_values(folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").values())
