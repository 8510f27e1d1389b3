"""Right configurations: what is filled in, joined, removed; and that parsing imports nothing heavy."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain import cli
from llmtrain.base.errors import ConfigError
from llmtrain.base.units import count
from llmtrain.commands.config import summary
from llmtrain.config import strict_yaml
from llmtrain.config.load import load, parse
from llmtrain.config.problems import Problems
from llmtrain.config.resolve import resolve, solve
from llmtrain.config.run import ModelConfig, Run, RunConfig, TrainConfig
from llmtrain.config.schema import schema
from llmtrain.config.strict_yaml import dump
from tests.helpers.config_workplace import RUN, ranks_at_least, write

ROOT = Path(__file__).parents[3]


def loaded(here: Path, run: Any = None, ds: Any = None, *argv: str, ranks: int = 2) -> Run:
    write(here, run, ds)
    return load(["--config", "run.yaml", *argv], ranks)


def test_defaults_are_filled_in(here: Path) -> None:
    run = loaded(here)
    optim, train = run.config.optim, run.config.train
    assert (optim.name, optim.lr, optim.betas, optim.eps) == ("adamw", 3e-4, (0.9, 0.95), 1e-8)
    assert (optim.weight_decay, optim.clip_norm) == (0.1, 1.0)
    assert (train.global_batch, train.micro_batch, train.accumulation) == (8, 2, 2)
    assert train.run_dir == "runs/run"
    assert (run.mix.precision, run.mix.zero_stage, run.mix.degrees.data) == ("bf16", 1, 2)
    assert (run.mix.offload_optimizer, run.mix.offload_param) == (False, False)
    assert run.max_steps == 100
    assert not run.mix.recomputes


@pytest.mark.parametrize(
    ("model", "ds", "layers", "said"),
    [
        ({}, {"activation_checkpointing": {}}, "all", "adamw, activation checkpointing\n"),
        (
            {"recompute": {"layers": 3, "keep": "attention"}},
            {"activation_checkpointing": {}},
            3,
            "adamw, activation checkpointing of 3 layers without attention\n",
        ),
        ({"recompute": {"layers": "auto"}}, {}, "auto", "checkpointing of as many layers as memory asks for\n"),
        ({"recompute": {"layers": 1}}, {"pipeline": {"stages": 2}}, 1, "checkpointing of 1 layer a stage\n"),
    ],
    ids=str,
)
def test_recomputed_layers_of_yaml_and_json(here: Path, model: Any, ds: Any, layers: Any, said: str) -> None:
    run = loaded(here, {"model": model}, ds)
    assert run.config.model.recompute.layers == layers
    assert run.mix.recomputes == (layers is not None)
    assert said in summary(run)


def test_the_exact_dict(here: Path) -> None:
    user = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": 1e9},
        "activation_checkpointing": {},
        "steps_per_print": 10,
        "communication_data_type": "fp32",
        "tensorboard": {"enabled": False},
        "pipeline": {"stages": "auto"},
    }
    run = loaded(here, None, user)
    assert run.deepspeed == {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "sub_group_size": 1e9},
        "activation_checkpointing": {},
        "communication_data_type": "fp32",
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 2**31 - 1,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    assert run.mix.recomputes
    notes = "\n".join(run.notes)
    for words in ("steps_per_print = 10 is replaced", "zero_optimization.reduce_bucket_size", "WarmupLR is all auto"):
        assert words in notes


def test_what_nothing_reads_is_noted(here: Path) -> None:
    """And values that are DeepSpeed's defaults are not worth a word."""
    ds = {
        "fp16": {"auto_cast": True},
        "zero_optimization": {"sub_group_size": 1e6, "stage3_max_reuse_distance": 1e9, "round_robin_gradients": False},
        "aio": {"block_size": 1048576, "queue_depth": 32},
        "pipeline": {"partition": "uniform", "pipe_partitioned": False},
        "expert_parallel": {"autoep_size": 1, "preset_model": "mixtral"},
        "vocabulary_size": 512,
        "timers": {"throughput": {"synchronized": False}},
        "dump_state": True,
        "comms_logger": {"enabled": True},
    }
    notes = [note.partition(": no effect: ")[0] for note in loaded(here, None, ds).notes if "no effect" in note]
    assert [keys.removeprefix("ds.json: ") for keys in notes] == [
        "zero_optimization.sub_group_size",
        "fp16.auto_cast",
        "aio.queue_depth",
        "pipeline.pipe_partitioned",
        "vocabulary_size",
        "timers.throughput.synchronized",
        "dump_state, comms_logger.enabled",
        "comms_logger.enabled",
        "pipeline.partition",
        "expert_parallel.preset_model",
    ]


def test_a_public_file_for_nvme_that_offloads_to_the_host_is_taken(here: Path) -> None:
    """DeepSpeed calls `thread_count` intra_op_parallelism by now, and reads neither without NVMe."""
    ds = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "aio": {"thread_count": 1}}
    notes = loaded(here, {"optim": {"lr": None}}, ds).notes
    assert [note for note in notes if note.startswith("ds.json: aio.thread_count ")]
    assert [note for note in notes if note.startswith("optim.lr: null ") and "0.0003" in note]


@pytest.mark.parametrize(
    "ds, note",
    [
        (
            {"fp16": {"enabled": False, "loss_scale_window": 10, "hysteresis": 2, "min_loss_scale": 4}},
            "fp16.loss_scale_window, fp16.min_loss_scale: no effect: fp16.enabled is not true",
        ),
        (
            {"bf16": {"enabled": False}, "fp16": {"enabled": True, "loss_scale": 128, "initial_scale_power": 8}},
            "fp16.initial_scale_power: no effect: fp16.loss_scale 128 is a fixed scale; with 0 DeepSpeed adapts it",
        ),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True, "loss_scale_window": 10}}, None),
        ({"flops_profiler": {"top_modules": 3}}, "flops_profiler.top_modules: no effect: flops_profiler.enabled is "),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none", "pin_memory": False}}},
            "zero_optimization.offload_optimizer.pin_memory: no effect: zero_optimization.offload_optimizer.device is ",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"pin_memory": False}}},
            "zero_optimization.offload_param.pin_memory: no effect: nothing reads it at ZeRO 2",
        ),
        (
            {"seq_parallel_communication_data_type": "bf16", "bf16": {"enabled": True}},
            "seq_parallel_communication_data_type: no effect: sequence_parallel_size is not above 1",
        ),
    ],
)
def test_keys_of_what_is_off_are_noted(here: Path, ds: dict[str, Any], note: str | None) -> None:
    notes = [note.removeprefix("ds.json: ") for note in loaded(here, None, ds).notes if "no effect" in note]
    assert len(notes) == (note is not None) and all(told.startswith(str(note)) for told in notes), notes


def test_ways_of_sending_the_tokens_of_experts_are_noted_and_do_not_reach_autoep(here: Path) -> None:
    """DeepSpeed's AutoEP would refuse them together, and needs DeepEP or Triton for them; no number depends on them."""
    ways = {"comm_backend": "deepep", "comm_num_sm": 24, "row_weighting_impl": "fused", "async_split_plan": True}
    section = {"autoep_size": 1, "gate_up_impl": "fused", "combine_impl": "fused_weighted_sum", **ways}
    run = loaded(here, None, {"expert_parallel": section})
    assert run.expert_parallel == {"autoep_size": 1, "combine_impl": "fused_weighted_sum"}
    notes = [note.removeprefix("ds.json: expert_parallel.") for note in run.notes if "expert_parallel." in note]
    assert [note.partition(": no effect: ")[2].partition(" ")[0] for note in notes[:3]] == ["an", "llmtrain", "the"]
    assert notes[2].endswith("as by weighted_sum, without DeepSpeed's Triton kernel")


def test_values_may_stand_in_the_json(here: Path) -> None:
    params = {"lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0}
    ds = {"train_batch_size": 12, "gradient_clipping": 0.5, "optimizer": {"type": "adam", "params": params}}
    run = loaded(here, {"train": {"global_batch": ...}}, ds)
    optim = run.config.optim
    assert (optim.lr, optim.betas, optim.eps, optim.weight_decay) == (1e-3, (0.8, 0.9), 1e-6, 0.0)
    assert (optim.name, optim.clip_norm, run.deepspeed["gradient_clipping"]) == ("adamw", 0.5, 0.5)
    assert (run.config.train.global_batch, run.config.train.accumulation) == (12, 3)


def test_the_same_value_in_both_files_is_fine(here: Path) -> None:
    ds = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.99]}}}
    assert loaded(here, {"optim": {"betas": [0.9, 0.99]}}, ds).config.optim.betas == (0.9, 0.99)


def test_overrides_win_over_the_yaml(here: Path) -> None:
    argv = ["--optim.lr", "1e-3", "--train.export=false", "--model.freeze", "[a, b]"]
    argv += ["--model.config.hidden_size", "128", "--optim.betas=[0.9,0.99]", "--train.sample_prompt", "a: b"]
    argv += ["--fault.preempt_file", "007"]
    config = loaded(here, None, None, *argv, "--local_rank=1").config
    assert (config.optim.lr, config.train.export, config.model.freeze, config.fault.preempt_file) == (
        1e-3,
        False,
        ["a", "b"],
        "007",
    )
    assert config.model.config == {**RUN["model"]["config"], "hidden_size": 128}
    assert (config.optim.betas, config.train.sample_prompt) == ((0.9, 0.99), "a: b")


def test_a_flag_that_is_true_or_false_may_stand_alone_with_dashes(here: Path) -> None:
    (here / "step-00000005").mkdir()
    argv = ["--resume", "step-00000005", "--resume-weights-only", "--train.export", "false"]
    config = loaded(here, None, None, *argv).config
    assert (config.resume, config.resume_weights_only, config.train.export) == ("step-00000005", True, False)
    assert not loaded(
        here, None, None, "--resume=step-00000005", "--resume-weights-only=false"
    ).config.resume_weights_only


def test_the_checkpoint_that_a_run_began_from_may_be_gone_once_the_run_has_its_own(here: Path) -> None:
    checkpoints = here / "runs" / "run" / "checkpoints"
    (checkpoints / "step-00000005.0.tmp").mkdir(parents=True)  # of a save that was killed
    with pytest.raises(ConfigError) as error:
        loaded(here, {"resume": "gone"})
    assert error.value.keys == {"resume"}
    (checkpoints / "step-00000005").mkdir()
    assert loaded(here, {"resume": "gone"}).config.resume == "gone"


def test_a_mixture_is_overridden_by_folder(here: Path) -> None:
    config = loaded(here, {"data": {"path": ...}}, None, "--data.mixture.data/x", "0.5").config
    assert config.data.mixture == {"data/x": 0.5}
    argv = ["--config", "run.yaml", "--data.mixture.data/v1.5", "2"]
    assert parse(argv, check_paths=False).config.data.mixture == {"data/v1.5": 2.0}


def test_a_count_may_be_written_with_an_exponent(here: Path) -> None:
    write(here)
    text = (here / "run.yaml").read_text().replace("max_steps: 100", "max_steps: 1e3\n  max_tokens: 2E+6")
    (here / "run.yaml").write_text(text)
    config = load(["--config", "run.yaml", "--train.log_every", "1e1", "--checkpoint.every_steps", "2E2"], 2).config
    assert (config.train.max_steps, config.train.max_tokens) == (1000, 2_000_000)
    assert (config.train.log_every, config.checkpoint.every_steps) == (10, 200)


def test_comments_in_the_json(here: Path) -> None:
    ds = '{\n  # ours\n  "bf16": {"enabled": false}, // not here\n  "zero_optimization": {"stage": 2}\n}'
    run = loaded(here, None, ds)
    assert (run.mix.precision, run.mix.zero_stage) == ("fp32", 2)


@pytest.mark.parametrize(
    ("fp16", "bf16", "precision"),
    [("auto", "auto", "bf16"), (True, "auto", "fp16"), ("auto", False, "fp32"), (False, True, "bf16")],
)
def test_precision_auto(here: Path, fp16: Any, bf16: Any, precision: str) -> None:
    run = loaded(here, None, {"fp16": {"enabled": fp16}, "bf16": {"enabled": bf16}})
    assert run.mix.precision == precision


@pytest.mark.parametrize(
    ("section", "optimizer", "param"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, True, False),
        ({"offload_optimizer": {"device": "none"}}, False, False),
        ({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, True, True),
        ({"cpu_offload": True}, True, False),
    ],
)
def test_offload(here: Path, section: dict[str, Any], optimizer: bool, param: bool) -> None:
    run = loaded(here, None, {"zero_optimization": {"stage": 3, **section}})
    assert (run.mix.offload_optimizer, run.mix.offload_param) == (optimizer, param)


@pytest.mark.parametrize(
    ("train", "steps"),
    [({"max_steps": 5}, 5), ({"max_steps": ..., "max_tokens": 2049}, 3), ({"max_steps": 2, "max_tokens": 9999}, 2)],
)
def test_max_steps_from_tokens(here: Path, train: dict[str, Any], steps: int) -> None:
    assert loaded(here, {"train": train}).max_steps == steps  # 8 x 128 tokens a step


def test_keys_that_others_make_idle_are_noted(here: Path) -> None:
    run = {
        "train": {"max_steps": 100, "eval": False, "eval_every": 5},
        "checkpoint": {"mode": "sync", "when_busy": "skip"},
    }
    notes = [note.partition(": no effect")[0] for note in loaded(here, run).notes if "no effect" in note]
    assert notes == ["train.eval_every", "checkpoint.when_busy"]
    run["train"] |= {"eval": True}
    run |= {"checkpoint": {"when_busy": "skip"}}
    assert not any(key in note for note in loaded(here, run).notes for key in ("train.", "when_busy"))


def test_wsd_decays_over_a_tenth(here: Path) -> None:
    assert loaded(here, {"schedule": {"name": "wsd"}}).config.schedule.decay_steps == 10


@pytest.mark.parametrize(
    ("kind", "schedule", "told"),
    [
        (
            "WarmupLR",
            {},
            "then keeps the rate constant, whatever its lr_scheduler_type is; to do the same here, write "
            "schedule.name: constant",
        ),
        ("WarmupLR", {"name": "constant"}, ""),
        (
            "WarmupDecayLR",
            {"name": "linear"},
            "decays linearly to 0, whatever its lr_scheduler_type is; to do the same here, write schedule.name: "
            "linear, "
            "schedule.min_ratio: 0",
        ),
        ("WarmupDecayLR", {"name": "linear", "min_ratio": 0}, ""),
        ("WarmupCosineLR", {"name": "linear"}, "schedule.name: cosine, schedule.min_ratio: 0.0001"),
    ],
)
def test_what_an_automatic_scheduler_is_elsewhere_is_said(
    here: Path, capsys: pytest.CaptureFixture[str], kind: str, schedule: dict[str, Any], told: str
) -> None:
    write(here, {"schedule": schedule}, {"scheduler": {"type": kind, "params": {"warmup_num_steps": "auto"}}})
    assert cli.main(["config", "show", "run.yaml", "--world-size", "2"]) == 0
    output = capsys.readouterr().out
    assert f"{kind} is all auto" in output and (told or "decides\n") in output


def test_the_optimizers_values_are_told_with_their_origins(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A JSON without betas, decay and clipping has others with DeepSpeed alone."""
    write(here, {"optim": {"name": "adamw", "lr": 1e-3}}, {"optimizer": {"type": "AdamW", "params": {"eps": 1e-6}}})
    assert cli.main(["config", "show", "run.yaml", "--world-size", "2", "--optim.weight_decay", "0.2"]) == 0
    told = (
        "lr 0.001 (run.yaml); betas [0.9, 0.95], clip_norm 1.0 (llmtrain's defaults); weight_decay 0.2 (command line)"
    )
    assert f"optim:   {told}; eps 1e-06 (ds.json)\n" in capsys.readouterr().out


@given(
    micro=st.integers(1, 8) | st.none(),
    accumulation=st.integers(1, 8) | st.none(),
    ranks=st.integers(1, 8),
    factor=st.integers(1, 8) | st.none(),
)
def test_a_solution_keeps_what_was_given(
    micro: int | None, accumulation: int | None, ranks: int, factor: int | None
) -> None:
    whole = None if factor is None else factor * (micro or 1) * (accumulation or 1) * ranks
    given = {"global_batch": whole, "micro_batch": micro, "accumulation": accumulation}
    batch = solve(given, ranks, 32, world="", problems=(problems := Problems()), place="")
    if batch is None:
        assert problems
        assert micro and accumulation and factor != 1
        return
    assert batch.global_batch == batch.micro_batch * batch.accumulation * ranks
    assert whole in (None, batch.global_batch)
    assert micro in (None, batch.micro_batch)
    assert accumulation in (None, batch.accumulation)


def test_a_dump_reads_back_to_the_same_run(here: Path) -> None:
    write(here, {"model": {"freeze": ["off", "a: b"]}, "train": {"sample_prompt": "x\ny"}})
    first = resolve(parse(["--config", "run.yaml", "--fault.preempt_file", "1e-3"]).config, 2).config
    (here / "again.yaml").write_text(dump(first))
    assert parse(["--config", "again.yaml"]).config == first
    assert first.fault.preempt_file == "1e-3"


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=20))
def test_any_text_survives_a_dump(text: str) -> None:
    config = RunConfig(deepspeed="x", model=ModelConfig(pretrained="m"), train=TrainConfig(sample_prompt=text))
    tree = strict_yaml.parse(dump(config), "dump").tree
    assert tree["train"]["sample_prompt"] == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1_000", 1000),
        ("off", "off"),
        ("1:30", "1:30"),
        ("0x10", "0x10"),
        ("~", None),
        ("'1'", "1"),
        ("True", True),
        ("2024-01-01", "2024-01-01"),
        ("-.5", -0.5),
        ("null", None),
        ("1.", 1.0),
    ],
)
def test_plain_scalars(text: str, value: Any) -> None:
    tree = strict_yaml.parse(f"key: {text}", "t").tree
    assert tree == {"key": value}
    assert type(tree["key"]) is type(value)


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda p: p.name)
def test_every_ds_config(here: Path, path: Path) -> None:
    run = loaded(here, {"deepspeed": str(path)}, ranks=2 * ranks_at_least(path))
    name = path.stem
    assert run.mix.precision == ("fp32" if "fp32" in name else "fp16" if "fp16" in name else "bf16")
    assert not name.startswith("zero") or run.mix.zero_stage == int(name[4])
    for way in ("pipeline", "tensor"):
        assert (getattr(run.mix.degrees, way) > 1) == (way in name)
    assert run.mix.offload_param == run.mix.offload_optimizer == ("offload" in name)
    assert run.mix.recomputes == (name in ("zero3_offload", "zero3_recompute", "long_context"))
    json.loads(path.read_text())  # plain JSON: any DeepSpeed stack can read it
    assert f"`{path.name}`" in (ROOT / "ds_configs/README.md").read_text()


def test_help_names_every_field(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert (
        "--optim.lr LR Peak learning rate (of AdamW). Or from the JSON. (greater than 0 and at most 1) (type: float"
        in told
    )
    assert all(f"--{key}" in told for key in schema())


def test_a_mistake_is_told_before_anything_heavy_is_imported(here: Path) -> None:
    write(here)
    code = (
        "import sys; from llmtrain.cli import main;"
        "codes = [main(['config', 'show', 'run.yaml']), main(['config', 'check', 'run.yaml', '--optim.lr', '-1'])];"
        "heavy = {'torch', 'deepspeed', 'transformers', 'numpy', 'pandas', 'wandb'} & set(sys.modules);"
        "assert not heavy, heavy; assert codes == [0, 2], codes"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], cwd=here, check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time, as others may have the machine: 0.3 s on an idle 2-core machine.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


def test_positions_beyond_those_of_the_model_are_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here)
    argv = ["config", "check", "run.yaml", "--model.config.max_position_embeddings"]
    assert cli.main([*argv, "64"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"data\.sequence_length 128 .* 64 positions.*model\.config\.max_position_embeddings", told)
    assert cli.main([*argv, "128"]) == 0
    assert "positions" not in capsys.readouterr().out


_EARLIER_LLAMA = {  # what config.json files of published models hold
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "pretraining_tp": 1,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                     "original_max_position_embeddings": 8192},
    "rope_theta": 5e5, "torch_dtype": "bfloat16", "transformers_version": "4.43.0", "use_cache": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        _EARLIER_LLAMA,
        {"model_type": "qwen2", "head_dim": 16, "use_sliding_window": False, "max_window_layers": 1},
        {"model_type": "gpt2", "hidden_size": ..., "n_embd": 64, "num_hidden_layers": 1, "n_inner": None, "n_head": 4},
        {
            "model_type": "gemma3_text",
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {
            "model_type": "phi3",
            "num_attention_heads": 4,
            "pad_token_id": 0,
            "original_max_position_embeddings": 4096,
            "embd_pdrop": 0.0,
            "rope_scaling": None,
        },
        {
            "model_type": "dbrx",
            "hidden_size": ...,
            "intermediate_size": ...,
            "d_model": 64,
            "attn_config": {"rope_theta": 5e5, "kv_n_heads": 2, "clip_qkv": 8.0},
        },
    ],
    ids=[
        "llama of 2024",
        "asked for by the model alone",
        "own names",
        "one rope for each kind of layer",
        "phi3",
        "read from a section",
    ],
)
def test_a_familys_own_fields_are_taken(fields: dict[str, Any], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, {"model": {"config": fields}})
    assert cli.main(["config", "check", "run.yaml"]) == 0, capsys.readouterr().err


def _families() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.slow
def test_every_family_knows_the_fields_that_it_writes_itself() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from llmtrain.models.run.check import check_fields

    def plain(value: Any) -> Any:
        return {k: plain(v) for k, v in value.items() if k[0] != "_"} if isinstance(value, dict) else value

    tried = 0
    for name in _families():
        try:
            written = json.loads(json.dumps(CONFIG_MAPPING[name]().to_dict(), default=str))
        except Exception:  # no defaults for all fields, or no such configuration
            continue
        check_fields({**plain(written), "model_type": name}, problems := Problems())
        assert not problems, f"{name}: {problems.error()}"
        tried += 1
    assert tried >= 150


def test_auto_that_no_feature_decides_takes_least_memory(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmtrain.features.decides", list)
    write(here, {"model": {"recompute": {"layers": "auto"}}, "train": {"micro_batch": "auto", "global_batch": 8}})
    assert cli.main(["config", "check", "run.yaml"]) == 0
    told = capsys.readouterr().out
    for key, value in (("train.micro_batch", 1), ("model.recompute.layers", "all")):
        assert f"{key} auto: no feature chooses a value that fits the device's memory, so it is {value}\n" in told


def test_check_tells_the_degrees_and_what_no_device_holds(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, None, {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}})
    assert cli.main(["config", "check", "run.yaml", "--world-size", "4"]) == 0
    told = capsys.readouterr().out
    assert "ranks:   4 = pipeline 2 x data-parallel 2\n" in told
    parameters = 2 * (4 * 64 * 64 + 3 * 64 * 11008 + 2 * 64) + 2 * 512 * 64 + 64
    assert f"model:   {count(parameters)} parameters\n" in told
    write(here, {"model": {"config": {"hidden_size": 16384, "num_hidden_layers": 110}}})
    assert cli.main(["config", "check", "run.yaml"]) == 0
    told = capsys.readouterr().out
    assert "178B parameters" in told and re.search(r"2\.\d+ TiB .*device", told)
