"""`llmtrain parity` up to the start of its ranks, for the families of the installed transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llmtrain.cli import main
from llmtrain.parity import worlds

pytestmark = pytest.mark.long

BIG: dict[str, dict[str, Any]] = {
    "falcon-40b": {
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "hidden_size": 8192,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "num_hidden_layers": 60,
    },
    "falcon-rw": {"model_type": "falcon", "multi_query": False, "alibi": True, "num_attention_heads": 32},
    "gpt-neo-125m": {
        "model_type": "gpt_neo",
        "num_layers": 12,
        "num_heads": 12,
        "hidden_size": 768,
        "attention_types": [[["global", "local"], 6]],
    },
    "deepseek-v3": {"model_type": "deepseek_v3", "first_k_dense_replace": 8},
    "bamba": {"model_type": "bamba", "attn_layer_indices": [9, 18, 27]},
    "gemma4": {"model_type": "gemma4_text"},
    "jamba": {"model_type": "jamba"},
    "kimi": {"model_type": "kimi_linear"},
    "longcat": {"model_type": "longcat_flash"},
    "nemotron-h": {"model_type": "nemotron_h"},
    "a small one of a kind that is not shrunk": {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2},
}
"""Real sizes, with fields of other names, or with layers whose kinds follow from their numbers."""
WORDS = {
    "falcon-40b": "4 layers, width 512, 64 / 64 heads",
    "falcon-rw": "4 layers, width 64, 4 / 4 heads",
    "gpt-neo-125m": "4 layers, width 64, 4 / 4 heads",
    "deepseek-v3": "4 layers, width",
    "jamba": "5 layers, width 128",
}
NO_SDPA = ["bloom", "gpt_oss", "vaultgemma", "gemma2", "gpt_neo", "mpt"]
REFUSED = {
    r"use its text model by itself": (
        "dots3_note emu3 fuyu gemma3 gemma4 gemma4_unified got_ocr2 llama4 mllama moss_transcribe_diarize qwen3_5 "
        "qwen3_5_moe"
    ),
    r"recurrent and state-space models do without heads": "blt falcon_mamba mamba mamba2 rwkv xlstm",
    r"no small copy of a .* model can be made: (Class validation error|its layers differ in)": "dots3_note_text xlnet",
    r"has no num_hidden_layers": "prophetnet",
    r"a small copy of a .* model does not run": "deepseek_v2 gemma3n_text plbart xmod zamba",
    # Their configuration class cannot be built as it stands, by nobody: it wants fields that are None by default.
    r"transformers cannot build": (
        "cohere_compass_text dbrx dots1 gemma3n gemma4_unified_assistant hunyuan_v1_dense hunyuan_v1_moe lfm2_moe "
        "ministral nemotron qwen4_exp qwen4_exp_text reformer"
    ),
    r"holds several text models": "musicgen musicgen_melody",
    r"is not a model configuration": "gemma4_assistant",
    # What training refuses is refused here, in the same words.
    r"reads in both directions": "cpmant xlm",
    r"reads in both directions|computed in chunks": (
        "bert bert-generation big_bird camembert data2vec-text ernie inkling_text megatron-bert modernbert-decoder "
        "recurrent_gemma roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl"
    ),
    r"its head takes \d+ features": "electra rembert",
    r"checkpoints hold floating-point tensors only": "deepseek_v4",
    r"without logits": "llama4_text",
    # What training allows, and nobody can compare.
    r"draws random numbers in training": "phimoe",
}
"""Why a family is refused with its default configuration."""


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds.AgainstPlain, "of_ranks", lambda *_: worlds.SAME)


ZERO_1 = {"zero_optimization": {"stage": 1}}


def parity(
    folder: Path, model: dict[str, Any], capfd: pytest.CaptureFixture[str], *words: str, json_of_run: Any = ZERO_1
) -> tuple[int, str]:
    (folder / "ds.json").write_text(json.dumps(json_of_run))
    run = folder / "run.yaml"
    run.write_text(
        json.dumps(
            {
                "deepspeed": str(folder / "ds.json"),
                "model": {"config": model},
                "data": {"path": "none"},
                "train": {"global_batch": 8, "micro_batch": 4, "max_steps": 100},
            }
        )
    )
    code = main(["parity", str(run), "--device", "cpu", *words])
    told = capfd.readouterr()
    return code, told.out + told.err


@pytest.mark.parametrize("name", BIG)
def test_a_small_copy_whatever_the_familys_fields_are_called(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = parity(tmp_path, BIG[name], capfd, "--model.attention", "eager")
    assert code == 0 and "PASS" in text, text
    assert f"{BIG[name]['model_type']}, {WORDS.get(name, '')}" in text


@pytest.mark.parametrize("family", NO_SDPA)
def test_an_attention_that_the_family_lacks_is_refused_with_the_key(
    tmp_path: Path, family: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = parity(tmp_path, {"model_type": family}, capfd)
    assert code == 2 and "Traceback" not in text
    assert re.search(r"model\.attention sdpa: transformers has none for \w+; set model\.attention to eager", text), text


def test_flash_attention_becomes_on_a_cpu_what_the_family_has(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(
        worlds.AgainstPlain, "of_ranks", lambda *given: seen.append(given[2].run.config.model.attention) or 0
    )
    for family in ("gpt_oss", "llama"):
        assert parity(tmp_path, {"model_type": family}, capfd, "--model.attention", "flash_attention_2")[0] == 0
    assert seen == ["eager", "sdpa"]


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("cpmant", "reads in both directions"),
        ("phimoe", "draws random numbers in training in addition to dropout"),
        ("mamba", "training itself needs none.*give model.config small sizes of your own"),
    ],
)
def test_what_training_refuses_or_nobody_can_compare_is_refused(
    tmp_path: Path, family: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = parity(tmp_path, {"model_type": family}, capfd, "--model.attention", "eager")
    assert code == 2 and re.search(says, text, re.DOTALL) and "PASS" not in text, text


def test_a_world_size_that_is_refused_is_told_before_any_rank_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hide that another one has failed."""
    monkeypatch.setattr(worlds.AgainstPlain, "of_ranks", lambda *_: pytest.fail("ranks start"))
    shared = {**ZERO_1, "tensor_parallel": {"autotp_size": 2}}
    code, text = parity(tmp_path, {"model_type": "llama"}, capfd, "--ranks", "2,3", json_of_run=shared)
    assert code == 2 and "autotp_size" in text, text


def test_a_bug_is_no_word_about_the_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(worlds.AgainstPlain, "of_ranks", broken)
    code, text = parity(tmp_path, {"model_type": "llama"}, capfd)
    assert code == 3 and "RuntimeError: a bug" in text and "NO ANSWER" in text and "FAIL" not in text


@pytest.mark.slow
def test_all_families_are_shrunk_or_refused_in_a_users_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    expected = {family: reason for reason, families in REFUSED.items() for family in families.split()}
    wrong = []
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        code, text = parity(tmp_path, {"model_type": family}, capfd, "--model.attention", "eager")
        reason = expected.get(family)
        if code != (0 if reason is None else 2) or (reason and not re.search(reason, text)):
            wrong.append(f"{family}: {code}: {text[-300:]}")
    assert not wrong, "\n".join(wrong)
