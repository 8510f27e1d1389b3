"""The key tables against the installed DeepSpeed, so that they cannot rot; and what DeepSpeed itself refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmtrain import cli
from llmtrain.config import ds_keys
from llmtrain.config.deepspeed import deep_check
from llmtrain.config.load import load
from llmtrain.errors import ConfigError
from tests.helpers.config_workplace import ranks_at_least, write

pytest.importorskip("deepspeed")
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
    assert names - removed - by_initialize == set(ds_keys.KEYS) - by_initialize
    assert not removed & set(ds_keys.KEYS)


def test_removed_keys_are_those_of_deepspeed() -> None:
    from deepspeed.runtime import config

    theirs = set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    theirs |= {f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS}
    assert set(ds_keys.REMOVED) == theirs


def _models() -> dict[str, Any]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
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
        "bfloat16": DeepSpeedBF16Config,
        "tensor_parallel": TPTrainingConfig,
        "compile": CompileConfig,
        "comms_logger": CommsLoggerConfig,
        "hybrid_engine": HybridEngineConfig,
        "tensorboard": monitor.TensorBoardConfig,
        "csv_monitor": monitor.CSVConfig,
        "wandb": monitor.WandbConfig,
        "comet": monitor.CometConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }


def test_nested_keys_are_those_of_deepspeeds_models() -> None:
    for section, model in _models().items():
        known: Any = ds_keys.KEYS
        for part in section.split("."):
            known = known[part]
        theirs = {item.alias or name for name, item in model.model_fields.items()}
        assert set(known) == theirs, section


def test_every_second_name_that_deepspeed_takes_is_known() -> None:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    assert DeepSpeedConfigModel.model_config["populate_by_name"]
    theirs = {
        f"{section}.{name}": item.alias
        for section, model in _models().items()
        for name, item in model.model_fields.items()
        if item.alias not in (None, name)
    }
    assert theirs == ds_keys.ALIASES


def test_nested_kinds_fit_deepspeeds_types() -> None:
    """A value of our kind passes DeepSpeed's model: the table never allows what DeepSpeed refuses for its type."""
    kinds = {"bool": bool, "int": int}
    for section, model in _models().items():
        known: Any = ds_keys.KEYS
        for part in section.split("."):
            known = known[part]
        for name, item in model.model_fields.items():
            kind = known[item.alias or name]
            if item.annotation in (bool, int) and kind != "num":
                assert kinds.get(kind) is item.annotation, f"{section}.{name}"


def test_plain_sections_are_those_of_deepspeeds_constants() -> None:
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.config import get_pipeline_config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    assert set(ds_keys.KEYS["activation_checkpointing"]) == set(ACT_CHKPT_DEFAULT)
    assert set(ds_keys.KEYS["aio"]) == set(AIO_DEFAULT_DICT)
    # the pipeline engine itself asks for use_reentrant
    assert set(ds_keys.KEYS["pipeline"]) == set(get_pipeline_config({})) | {"use_reentrant"}


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda p: p.name)
def test_deepspeed_accepts_every_ds_config(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"deepspeed": str(path)})
    monkeypatch.chdir(tmp_path)
    deep_check(load(["--config", "run.yaml"], ranks_at_least(path)).deepspeed, str(path))


def test_what_deepspeed_refuses_is_told_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, None, {"zero_optimization": {"stage": 2, "reduce_bucket_size": -1}})
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config", "check", "run.yaml"]) == 2
    told = capsys.readouterr().err
    assert "reduce_bucket_size = -1" in told
    assert "DeepSpeed says" in told


def test_deep_check_turns_an_assertion_into_a_config_error() -> None:
    exact = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    broken = {**exact, "fp16": {"enabled": True}, "bf16": {"enabled": True}}
    with pytest.raises(ConfigError, match="simultaneously"):
        deep_check(broken, "ds.json")
