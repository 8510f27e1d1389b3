"""Configurations whose model, data or folder is wrong, and what the message about each must hold."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.prepared import write_prepared
from tests.helpers.wrong_configurations import Wrong, nested


def _shard_gone(folder: Path) -> None:
    (folder / "data/x/train-00000.bin").unlink()


def _short_data(folder: Path) -> None:
    write_prepared(folder / "data/short", [[[1, 2, 3]]], [[[4, 5]]], vocab_size=512)


def _other_manifest(key: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "data/x/manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))

    return change


def _swapped_shards(folder: Path) -> None:
    documents = [[list(range(1, 400))], [list(range(2, 401))]]
    write_prepared(folder / "data/two", documents, documents, vocab_size=512)
    path = folder / "data/two/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["shards"]["train"].reverse()
    path.write_text(json.dumps(manifest))


def _weightless(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 512, "n_layer": 1}))


def _adapter_alone(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model/adapter_config.json").write_text("{}")


def _run_with(name: str) -> Callable[[Path], None]:
    def before(folder: Path) -> None:
        (folder / "model" / name).parent.mkdir(parents=True)
        (folder / "model" / name).write_text("{}")

    return before


def _other_head(folder: Path) -> None:
    """As merging an adapter with both matrices leaves it, where the base ties them."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    (folder / "model").mkdir()
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=False)
    tensors = LlamaForCausalLM(config).state_dict()
    save_file(tensors, folder / "model/model.safetensors")
    (folder / "model/config.json").write_text(json.dumps({**config.to_dict(), "tie_word_embeddings": True}))


def _other_padding(folder: Path) -> None:
    _other_head(folder)
    path = folder / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token_id": 600}))


def _model(**fields: Any) -> dict[str, Any]:
    return {"model": {"config": fields}}


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
           "intermediate_size": 48}  # fmt: skip
GPT2 = {"model_type": "gpt2", "num_hidden_layers": ..., "n_layer": 2, "n_head": 4}

MODEL_CASES = [
    *(
        Wrong(
            f"an epsilon of {eps}",  # which was told to be no number
            (f"model.config.rms_norm_eps = {eps}", "must be greater than 0 and finite", "the family's default"),
            {"model": {"config": {"rms_norm_eps": eps}}},
        )
        for eps in (-1, 0)
    ),
    *(
        Wrong(
            f"{key} {value}",
            (f"model.config.{key} = {json.dumps(value)}", rule, remedy),
            _model(**nested(key, value, {})),
        )
        for keys, values, rule, remedy in (
            (
                ("rope_theta", "rope_parameters.rope_theta"),
                (0, -1, math.nan, math.inf),
                "must be greater than 0 and finite",
                "10000.0 is the family's default",
            ),
            (("rope_parameters.factor", "rope_scaling.factor"), (0.0, math.inf), "must be ", "correct the number"),
            (("initializer_range",), (-0.02, 100.0), "must be greater or equal to 0.0", "0.02 is the family's default"),
            (("initializer_range",), (1,), "must be a number with a decimal point", "write 1.0"),
            (("initializer_range", "attention_dropout"), (math.nan, math.inf), "must be finite", "family's default"),
            (
                ("eos_token_id", "bos_token_id", "pad_token_id"),
                (512, -1),
                "is not in the vocabulary, which has the tokens 0 to 511",
                "or null for none",
            ),
            (("eos_token_id",), ([1, 99999],), "token 99999 is not in the vocabulary", "or null for none"),
        )
        for key in keys
        for value in values
    ),
    Wrong(
        "a factor below 0",
        ("router_aux_loss_coef = -0.5", "must be 0 or greater", "correct the number"),
        _model(model_type="mixtral", num_local_experts=4, router_aux_loss_coef=-0.5),
    ),
    Wrong(
        "logits that are no numbers",  # 1e-45 as a float of 32 bits divides by 0
        ("LlamaForCausalLM with these settings", "not finite numbers", "rotary positions"),
        _model(rope_parameters={"rope_type": "linear", "factor": 1e-300, "rope_theta": 1e4}),
    ),
    Wrong(
        "a padding token of another vocabulary",
        ("pad_token_id = 600 in its configuration is not in its vocabulary of 512", "or to null"),
        {"model": {"config": ..., "pretrained": "model"}},
        before=_other_padding,
    ),
    Wrong(
        "experts of a dense model",
        ("expert_parallel.autoep_size = 2", "llama model has no experts", "remove the section"),
        ds={"expert_parallel": {"enabled": True, "autoep_size": 2}},
    ),
    *(
        Wrong(what, says, _model(**model), {"expert_parallel": {"enabled": True, "autoep_size": 2, **section}})
        for what, says, model, section in (  # which only the ranks of a launch refused
            (
                "experts that two ranks cannot share",
                ("num_experts=3", "is not divisible by autoep_size=2", "remove the section"),
                {**MIXTRAL, "num_local_experts": 3},
                {},
            ),
            (
                "a preset that there is not",
                ("cannot share the experts of a mixtral model", "nonsense", "remove the section"),
                MIXTRAL,
                {"preset_model": "nonsense"},
            ),
            (
                "a preset of another family",
                ("preset_model 'deepseek_v3'", "do not compute what transformers' mixtral does"),
                MIXTRAL,
                {"preset_model": "deepseek_v3"},
            ),
        )
    ),
    Wrong(
        "no experts",  # which ended in a traceback
        ("the sizes of this MixtralForCausalLM do not go together", "Compare heads, widths"),
        _model(**{**MIXTRAL, "num_local_experts": 0}),
    ),
    # the model against its family
    Wrong(
        "typo in the model",
        ("model.config.num_hiden_layers = 2", "line ", "LlamaConfig", "did you mean num_hidden_layers?"),
        _model(num_hiden_layers=2),
    ),
    Wrong(
        "typo in rotary positions",
        ("model.config.rope_parameters.rope_thetta = 10000", "did you mean rope_theta?"),
        _model(rope_parameters={"rope_type": "default", "rope_thetta": 1e4}),
    ),
    Wrong(
        "typo in a model within the model",
        ("model.config.text_config.hiden_size = 8", "Gemma3TextConfig", "did you mean hidden_size?"),
        {
            "model": {
                "config": {
                    "model_type": "gemma3",
                    "hidden_size": ...,
                    "num_hidden_layers": ...,
                    "vocab_size": ...,
                    "text_config": {"hiden_size": 8},
                }
            }
        },
    ),
    Wrong(
        "a setting of generation",
        ("model.config.temperature = 0.7", "setting of generation", "remove it"),
        _model(temperature=0.7),
    ),
    Wrong(
        "text for the number of layers",
        ('model.config.num_hidden_layers = "two"', "must be a whole number", "family's default, 32"),
        _model(num_hidden_layers="two"),
    ),
    Wrong("number in quotes", ('hidden_size = "64"', "remove the quotes: 64"), _model(hidden_size="64")),
    Wrong("a size with an exponent", ("hidden_size = 64.0", "whole number", "write 64"), _model(hidden_size=6.4e1)),
    Wrong(
        "a model whose folder cannot be written at the end",
        ("HrmText", "no cut of a parameter into consecutive parts", "Set train.export to false"),
        _model(model_type="hrm_text", num_attention_heads=4),
    ),
    Wrong(
        "a model whose folder could not be loaded again",
        ("Emu3ForCausalLM of a part of its configuration, Emu3TextConfig", "Set train.export to false"),
        _model(
            model_type="emu3",
            **dict.fromkeys(("hidden_size", "num_hidden_layers", "vocab_size"), ...),
            vq_config={"hidden_size": 32, "num_attention_heads": 1},
            text_config={
                "vocab_size": 512,
                "pad_token_id": 0,
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "intermediate_size": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
        ),
    ),
    Wrong(
        "a layer between decoder and head",
        ("its head takes 96 features, and its decoder gives 64",),
        {
            "model": {
                "attention": "eager",
                "config": {
                    "model_type": "rembert",
                    "is_decoder": True,
                    "num_attention_heads": 4,
                    "intermediate_size": 64,
                    "input_embedding_size": 16,
                    "output_embedding_size": 96,
                },
            }
        },
    ),
    Wrong(
        "more experts for a token than there are",
        ("do not go together", "k not in range for dimension"),
        _model(model_type="mixtral", num_local_experts=4, num_experts_per_tok=8),
    ),
    Wrong("no layers", ("num_hidden_layers = 0", "at least 1", "correct the number"), _model(num_hidden_layers=0)),
    Wrong("no heads", ("num_attention_heads = 0", "at least 1", "correct the number"), _model(num_attention_heads=0)),
    Wrong("a negative width", ("intermediate_size = -8", "at least 1"), _model(intermediate_size=-8)),
    Wrong("activation unknown", ('hidden_act = "sillu"', "did you mean silu?"), _model(hidden_act="sillu")),
    Wrong(
        "heads that do not divide the width",
        ("hidden_size = 64 with model.config.num_attention_heads = 7  (run.yaml, line", "change one of them"),
        _model(num_attention_heads=7),
    ),
    Wrong(
        "key/value heads that do not divide the heads",
        ("model.config.num_key_value_heads = 3", "equally many of the 4 attention heads", "set it to one of 1, 2, 4"),
        _model(num_attention_heads=4, num_key_value_heads=3),
    ),
    Wrong(
        "a tensor beyond all memory",
        (
            "one of its tensors alone needs more memory than this host has",
            "the largest are intermediate_size = 67108864",
        ),
        _model(hidden_size=2**22, intermediate_size=2**26, num_attention_heads=2**15),
    ),
    Wrong(
        "a tensor whose bytes have more than 64 bits",
        ("one of its tensors alone needs more memory", "the largest are hidden_size = 4611686018427387904"),
        _model(hidden_size=2**62),
    ),
    Wrong(
        "layers without end",
        ("num_hidden_layers = 100000 in its configuration: no model has more than 10000", "Correct the number"),
        _model(num_hidden_layers=10**5),
    ),
    Wrong("model type unknown", ('model_type = "lama"', "did you mean llama?"), _model(model_type="lama")),
    Wrong("model type that is no decoder", ('model_type = "t5"', "no causal"), _model(model_type="t5")),
    Wrong(
        "model that reads in both directions",
        ("BertLMHeadModel reads in both directions", "Take a decoder"),
        _model(model_type="bert", num_attention_heads=4),
    ),
    Wrong(
        "sequence longer than learned positions",
        ("data.sequence_length = 128", "a table of 64 positions (model.config.n_positions)", "set it to 64 or less"),
        _model(**GPT2, n_positions=64),
    ),
    Wrong(
        "flash attention without its package",
        ('model.attention = "flash_attention_2"', "flash_attn is not installed", "set model.attention to sdpa"),
        {"model": {"attention": "flash_attention_2"}},
    ),
    Wrong(
        "more stages than layers",
        ("pipeline.stages = 4", "the model has 2", "at most 2 stages"),
        ds={"pipeline": {"stages": 4}},
        ranks=4,
    ),
    Wrong(
        "folder without weights",
        ("model.pretrained", "no model.safetensors"),
        {"model": {"config": ..., "pretrained": "model"}},
        before=_weightless,
    ),
    Wrong(
        "folder that says tied and holds a head of its own",
        (
            "model: config.json ties lm_head.weight to model.embed_tokens.weight",
            "differ",
            "tie_word_embeddings to false",
        ),
        {"model": {"config": ..., "pretrained": "model"}},
        before=_other_head,
    ),
    Wrong(
        "folder of an adapter",
        ('model.pretrained = "model"', "of an adapter, without its model", "to-hf RUN OUT --merge", "adapter.start"),
        {"model": {"config": ..., "pretrained": "model"}},
        before=_adapter_alone,
    ),
    Wrong(
        "data and model exchanged",
        ('data.path = "model"', "a model and no data", 'model.pretrained = "data/x"', "prepared data and no model"),
        {"model": {"config": ..., "pretrained": "data/x"}, "data": {"path": "model"}},
        before=_weightless,
    ),
    Wrong(
        "a run as a model",
        ('model.pretrained = "model"', "the folder of a run", "name its export, model/export"),
        {"model": {"config": ..., "pretrained": "model"}},
        before=_run_with("export/config.json"),
    ),
    Wrong(
        "a run without an export as a model",
        ('model.pretrained = "model"', "is of a run", "llmtrain checkpoint to-hf model OUT"),
        {"model": {"config": ..., "pretrained": "model"}},
        before=_run_with("checkpoints/x"),
    ),
    # what trains
    Wrong(
        "a pattern that names no parameter",
        ('model.freeze = "model.layers.7.*"', "line ", "matches no parameter", "one of them is model."),
        {"model": {"freeze": ["model.layers.7.*"]}},
    ),
    Wrong(
        "nothing left to train",
        ('model.freeze = ["*"]', "leaves none of the", "name fewer"),
        argv=["--model.freeze", '["*"]'],
    ),
    # the data and the run's folder
    Wrong("a shard is gone", ("train-00000.bin", "is missing", "prepare it again"), before=_shard_gone),
    Wrong(
        "a separator of other data",
        ("data/x/manifest.json", "another order of them, separator or tokenizer"),
        before=_other_manifest("separator_id", 7),
    ),
    Wrong(
        "shards in another order",
        ("data/two/manifest.json", "another order of them", "prepare the folder again"),
        {"data": {"path": "data/two"}},
        before=_swapped_shards,
    ),
    Wrong(
        "too little data",
        ("data/short", "fill one sequence", "lower"),
        {"data": {"path": "data/short"}},
        before=_short_data,
    ),
    Wrong(
        "run folder below a file",
        ('train.run_dir = "run.yaml/x"', "run.yaml is a file", "path of a folder"),
        {"train": {"run_dir": "run.yaml/x"}},
    ),
    Wrong(
        "run folder in /proc",
        ('train.run_dir = "/proc/x"', "belongs to the kernel", "path of a folder"),
        {"train": {"run_dir": "/proc/x"}},
    ),
]
