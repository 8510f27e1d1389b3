"""The key tables against the installed DeepSpeed, so that they cannot rot; and what DeepSpeed itself refuses.

More than 20 CPU s: each number of the table is read out of its bounds through the complete reader.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from llmtrain import cli
from llmtrain.base.errors import ConfigError
from llmtrain.base.trees import lookup
from llmtrain.config.deepspeed import keys as ds_keys
from llmtrain.config.deepspeed.read import _is_of, checked, deep_check
from llmtrain.config.load import load
from llmtrain.config.problems import Problems, show
from tests.helpers.config_workplace import nested, ranks_at_least, write

ROOT = Path(__file__).parents[3]


class Asked(dict[str, Any]):
    """A dict that remembers which keys were asked for."""

    def __init__(self, *args: Any, names: set[str]) -> None:
        super().__init__(*args)
        self.names = names

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.names.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # `key in d.keys()` is then asked of us

    def __copy__(self) -> Asked:
        return Asked(self, names=self.names)


def test_every_top_level_key_that_deepspeed_asks_for_is_known() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    names: set[str] = set()
    DeepSpeedConfig(Asked({"train_batch_size": 1}, names=names))
    removed = {key for key in ds_keys.REMOVED if "." not in key}
    by_initialize = {"data_parallel_size", "sequence_parallel_size"}  # read in deepspeed/__init__.py
    aliases = {key for key in ds_keys.ALIASES if "." not in key}
    assert names - removed - by_initialize == (set(ds_keys.KEYS) | aliases) - by_initialize
    assert not removed & set(ds_keys.KEYS)


def test_removed_keys_are_those_of_deepspeed() -> None:
    from deepspeed.runtime import config

    theirs = set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    theirs |= {f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS}
    assert set(ds_keys.REMOVED) == theirs


def _models() -> dict[str, Any]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPConfig, TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "tensor_parallel": TPTrainingConfig,
        "tensor_parallel.tp": TPConfig,
        "compile": CompileConfig,
        "comms_logger": CommsLoggerConfig,
        "hybrid_engine": HybridEngineConfig,
        "tensorboard": monitor.TensorBoardConfig,
        "csv_monitor": monitor.CSVConfig,
        "wandb": monitor.WandbConfig,
        "comet": monitor.CometConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
        "weight_quantization": WeightQuantConfig,
    }


def section_of(dotted: str) -> dict[str, Any]:
    """The part of the table."""
    known: Any = ds_keys.KEYS
    for part in dotted.split("."):
        known = known[part]
    return known


def test_nested_keys_are_those_of_deepspeeds_models() -> None:
    for section, model in _models().items():
        theirs = {item.alias or name for name, item in model.model_fields.items()}
        assert set(section_of(section)) == theirs, section


def test_every_second_name_that_deepspeed_takes_is_known() -> None:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    assert DeepSpeedConfigModel.model_config["populate_by_name"]
    theirs = {
        f"{section}.{name}": item.alias
        for section, model in _models().items()
        for name, item in model.model_fields.items()
        if item.alias not in (None, name)
    }
    assert {**theirs, "bfloat16": "bf16"} == ds_keys.ALIASES


def test_nested_kinds_and_defaults_are_deepspeeds() -> None:
    """A value of our kind passes DeepSpeed's model, and what asks for nothing is what DeepSpeed does by itself."""
    ours = {
        "tensor_parallel.dtype": "a torch type, which no JSON can hold",
        "weight_quantization.enabled": "the section's presence switches it on",
    }
    for section, model in _models().items():
        for name, item in model.model_fields.items():
            key = section_of(section)[item.alias or name]
            if not isinstance(key, ds_keys.Key) or f"{section}.{name}" in ours:
                continue
            if item.annotation in (bool, int) and key.kind != "num":
                assert {"bool": bool, "int": int}[key.kind] is item.annotation, f"{section}.{name}"
            default = item.get_default(call_default_factory=True)
            assert key.default == getattr(default, "value", default), f"{section}.{name}"


def _numbers() -> dict[str, ds_keys.Key]:
    """Every key of a number that is not refused whatever it holds."""
    return {
        dotted: key
        for dotted, key in ds_keys.LEAVES.items()
        if key.kind in ("int", "num") and len(key.at) < len(ds_keys.STAGES)
    }


def test_every_number_has_bounds_as_narrow_as_deepspeeds() -> None:
    for section, model in _models().items():
        for name, item in model.model_fields.items():
            key = _numbers().get(f"{section}.{item.alias or name}")
            for bound in item.metadata if key else ():
                least = getattr(bound, "ge", getattr(bound, "gt", None))
                most = getattr(bound, "le", getattr(bound, "lt", None))
                assert least is None or key.least > least or (key.least == least and hasattr(bound, "ge")), name
                assert most is None or key.most < most or (key.most == most and hasattr(bound, "le")), name


@pytest.mark.parametrize("dotted", sorted(_numbers()))
def test_a_number_out_of_bounds_is_refused(
    dotted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """fp16.initial_scale_power 2000 ended in OverflowError, and a sequence_parallel_size of -1 was taken for 1."""
    monkeypatch.chdir(tmp_path)
    key = _numbers()[dotted]
    for wrong in (key.least - 1, -(10**9), 2**64, 1e300, *([2000] if key.most < 2000 else [])):
        write(tmp_path, None, nested(dotted, wrong, {}))
        assert cli.main(["config", "show", "run.yaml", "--world-size=2"]) == 2, wrong
        told = capsys.readouterr().err
        assert told.startswith("error: ") and f"{dotted} = " in told and "remedy: " in told


_OTHERS = (True, False, 3, 0.5, "x", ["x"], {"x": 1})
"""A value of each kind."""


def _refusals() -> Iterator[tuple[str, int, Any]]:
    """(key, ZeRO stage, value) for each reason of the table."""
    for dotted, key in ds_keys.LEAVES.items():
        known = set()
        for stage, value in product(ds_keys.STAGES, (*(single for single, _ in key.values), *_OTHERS)):
            fits = _is_of(key.kind, value) and not key.outside(value)
            if fits and (why := key.why_not(value, stage)) not in {None, *known}:
                known.add(why)
                yield dotted, stage, value


@pytest.mark.parametrize(("dotted", "stage", "value"), list(_refusals()))
def test_what_the_table_refuses_is_refused_with_its_reason(dotted: str, stage: int, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(nested(dotted, value, {"zero_optimization": {"stage": stage}})))
    with pytest.raises(ConfigError) as refused:
        checked(str(path), Problems())
    why = ds_keys.LEAVES[dotted].why_not(value, stage)
    assert why is not None
    assert all(text in str(refused.value) for text in (f"{dotted} = {show(value)}", why.rule, why.remedy))


def _sections() -> dict[str, dict[str, Any]]:
    """Sections that are no pydantic models -> their keys with DeepSpeed's defaults."""
    import dataclasses

    from deepspeed.autotuning.config import DeepSpeedAutotuningConfig
    from deepspeed.module_inject.auto_ep_presets.base import AutoEPConfig
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.config import get_pipeline_config
    from deepspeed.runtime.model_checkpointing import config as checkpoint
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    writer = checkpoint.get_checkpoint_writer_config({"writer": {"type": "FAST"}})
    experts = {
        item.name: None if item.default is _unset() else item.default
        for item in dataclasses.fields(AutoEPConfig)
        if item.init
    }
    return {
        "activation_checkpointing": dict(ACT_CHKPT_DEFAULT),
        "aio": dict(AIO_DEFAULT_DICT),
        # the pipeline engine itself asks for use_reentrant
        "pipeline": {**get_pipeline_config({}), "use_reentrant": True},
        "expert_parallel": experts,
        "flops_profiler": vars(DeepSpeedFlopsProfilerConfig({})),
        # two that it has set, and never reads
        "autotuning": {
            k: v for k, v in vars(DeepSpeedAutotuningConfig({})).items() if k not in ("start_step", "end_step")
        },
        "checkpoint.writer": writer,
    }


def _unset() -> Any:
    from deepspeed.module_inject.auto_ep_config import _UNSET

    return _UNSET


def test_plain_sections_are_those_of_deepspeeds_constants() -> None:
    for section, theirs in _sections().items():
        ours = {name: key.default for name, key in section_of(section).items()}
        assert set(ours) == set(theirs), section
        if section not in ("autotuning", "checkpoint.writer"):  # off, or nothing reads it: no value means anything
            assert ours == theirs, section


def test_every_name_that_deepspeed_reads_of_other_sections_is_known() -> None:
    """Sections that DeepSpeed takes apart with `get`: each name that it asks for is in the table."""
    from deepspeed.runtime.config import DeepSpeedConfig

    for section in ("data_types", "torch_autocast", "optimizer", "scheduler", "checkpoint", "data_efficiency"):
        names: set[str] = set()
        values: dict[str, Any] = {"type": "AdamW", "params": {}} if section in ("optimizer", "scheduler") else {}
        DeepSpeedConfig({"train_batch_size": 1, section: Asked(values, names=names)})
        assert names <= set(section_of(section)), section


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda p: p.name)
def test_deepspeed_accepts_every_ds_config(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"deepspeed": str(path)})
    monkeypatch.chdir(tmp_path)
    deep_check(load(["--config", "run.yaml"], ranks_at_least(path)).deepspeed, str(path))


def test_what_deepspeed_refuses_is_told_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, None, {"data_types": {"keep_in_fp32_modules": 3}})
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config", "check", "run.yaml"]) == 2
    assert "data_types.keep_in_fp32_modules" in capsys.readouterr().err
    exact = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    key = "zero_optimization.reduce_bucket_size"
    with pytest.raises(ConfigError, match=f"{key} = -1", check=lambda e: e.keys == {key}):
        deep_check({**exact, "zero_optimization": {"stage": 2, "reduce_bucket_size": -1}}, "ds.json")


def _nulls(section: ds_keys.Section) -> dict[str, Any]:
    return {name: None if isinstance(key, ds_keys.Key) else _nulls(key) for name, key in section.items()}


@pytest.mark.parametrize("whole", [True, False], ids=["sections", "keys"])
def test_null_is_accepted_for_every_key(whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page says so; DeepSpeed itself ends in an AttributeError for two dozen sections that are null."""
    sections = dict.fromkeys(ds_keys.KEYS) if whole else _nulls(ds_keys.KEYS)
    removed = {key: None for key in ds_keys.REMOVED if "." not in key}
    write(tmp_path, None, json.dumps({**sections, **removed}))
    monkeypatch.chdir(tmp_path)
    deep_check(load(["--config", "run.yaml"], 1).deepspeed, "ds.json")


@pytest.mark.parametrize("dotted", sorted(ds_keys.REMOVED))
def test_a_removed_section_that_is_off_is_accepted(
    dotted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public files switch elasticity and curriculum learning off; on, each is refused."""
    monkeypatch.chdir(tmp_path)
    parts = {"weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {}}}
    off: list[Any] = [None, False, {}, {"enabled": False, "max_train_batch_size": 2000}, parts]
    for value in [*off, *([-1] if dotted.endswith("mics_shard_size") else [])]:
        write(tmp_path, None, nested(dotted, value, {}))
        run = load(["--config", "run.yaml"], 1)
        assert f"ds.json: {dotted} has no effect: DeepSpeed does not read it" in run.notes
        assert lookup(run.deepspeed, dotted) is None
    for value in (True, {"enabled": True}, {"shared_parameters": {"enabled": True}}, 4):
        write(tmp_path, None, nested(dotted, value, {}))
        with pytest.raises(ConfigError) as refused:
            load(["--config", "run.yaml"], 1)
        assert any(key.startswith(dotted) for key in refused.value.keys)


def test_deep_check_turns_an_assertion_into_a_config_error() -> None:
    exact = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    broken = {**exact, "fp16": {"enabled": True}, "bf16": {"enabled": True}}
    with pytest.raises(ConfigError, match="simultaneously"):
        deep_check(broken, "ds.json")
