"""A configuration that transformers or an export of ours has written is read as what it was."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.base.errors import ModelError
from llmtrain.checkpoint.hf.folder_files import for_older_readers
from llmtrain.cli import main
from llmtrain.config.run import ModelConfig
from llmtrain.models.skeleton import load_config
from tests.helpers.hf_folders import model_folder
from tests.helpers.launching import REPO
from tools.families.configs import tiny
from tools.families.table import read

INFINITE = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h")


def test_every_family_reads_its_own_export_and_what_transformers_saves(tmp_path: Path) -> None:
    infinite = []
    for family in sorted({row["family"] for row in read(REPO / "docs/developers/families.jsonl")}):
        try:
            config = load_config(ModelConfig(config=tiny(family)))
        except ModelError as error:
            assert "several text models" in str(error), family
            continue
        folder = tmp_path / family
        config.save_pretrained(folder)
        text = (folder / "config.json").read_text()
        assert load_config(ModelConfig(pretrained=str(folder))).to_dict() == config.to_dict(), family
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        for scaling in [{}, {"rope_type": "yarn", "factor": 4.0}][: 2 if rope.get("full_attention") else 1]:
            if scaling:
                rope["full_attention"].update(scaling, original_max_position_embeddings=32)
            fields = json.loads(config.to_json_string())
            for_older_readers(fields)  # as an export has it
            (folder / "config.json").write_text(json.dumps(fields))
            again = load_config(ModelConfig(pretrained=str(folder))).to_dict()
            assert {key: again[key] for key in config.to_dict()} == config.to_dict(), (family, scaling)
        infinite += [family] if "Infinity" in text else []
    assert set(INFINITE) <= set(infinite)


@pytest.mark.parametrize("spelling", ["Infinity", '{"__float__": "Infinity"}'])
def test_an_infinite_number_in_either_spelling_in_a_file_or_in_a_run(tmp_path: Path, spelling: str) -> None:
    fields = json.dumps(tiny("mamba2"))[:-1] + f', "time_step_limit": [0.5, {spelling}]}}'
    (tmp_path / "config.json").write_text(fields)
    for given in (str(tmp_path), json.loads(fields)):
        assert load_config(ModelConfig(config=given)).time_step_limit[1] == math.inf


def test_a_folder_with_an_infinite_number_is_taken(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny("granitemoehybrid")))
    folder = model_folder(tmp_path / "hf", model)
    assert '"__float__"' in (folder / "config.json").read_text()
    assert main(["checkpoint", "from-hf", str(folder), str(tmp_path / "run"), "--check", "none"]) == 0
