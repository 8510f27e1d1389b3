"""Wrong configurations, and what the message about each must hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Wrong:
    """One way to be wrong, and what the message must hold: key, value, remedy."""

    name: str
    says: tuple[str, ...]
    run: dict[str, Any] | str | None = None
    ds: dict[str, Any] | str | None = None
    argv: list[str] = field(default_factory=list)
    ranks: int = 2
    before: Callable[[Path], object] | None = None
    """Called with the folder of the run's files."""


def nested(dotted: str, value: Any, base: dict[str, Any]) -> dict[str, Any]:
    """The base with a value at a dotted key."""
    section = base
    *sections, last = dotted.split(".")
    for name in sections:
        section = section.setdefault(name, {})
    section[last] = value
    return base


YAML = "deepspeed: ds.json\nmodel: {pretrained: null}\n"


def _tab(folder: Path) -> None:
    (folder / "run.yaml").write_text("model:\n\tconfig: {}\n")


def _latin_1(folder: Path) -> None:
    (folder / "run.yaml").write_bytes(b"# one\n# gr\xf6\xdfer\n")


def _own_config(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine/config.yaml").write_text("")


def _utf_16(folder: Path) -> None:
    (folder / "ds.json").write_bytes((folder / "ds.json").read_text().encode("utf-16"))


CASES = [
    Wrong("a YAML in Latin-1", ("is not UTF-8: byte 0xf6 in line 2", "iconv -f LATIN1"), before=_latin_1),
    Wrong("a tab in the YAML", ("a tab in the indentation", "indent with blanks", "line 2"), before=_tab),
    # the YAML and the command line: names
    Wrong("typo in a field", ("optim.lrr = 0.001", "line ", "did you mean optim.lr?"), {"optim": {"lrr": 0.001}}),
    Wrong("field in the wrong section", ("train.lr = 0.001", "did you mean optim.lr?"), {"train": {"lr": 0.001}}),
    Wrong(
        "a name that is like no other",
        ("train.größe = 3", "there is no such field", "remedy: remove it"),
        {"train": {"größe": 3}},
    ),
    Wrong("name of another stack", ("learning_rate = 0.1", "did you mean optim.lr?"), {"learning_rate": 0.1}),
    Wrong(
        "a flag of another stack without a value",
        ('--bf16 = "true"', "the DeepSpeed JSON decides this: `bf16.enabled`"),
        argv=["--bf16"],
    ),
    Wrong("a name of several sections", ("name = 3", "one of objective.name, optim.name,"), {"name": 3}),
    Wrong("precision in the YAML", ("train.bf16 = true", "the DeepSpeed JSON decides"), {"train": {"bf16": True}}),
    Wrong("typo in an override", ('--optim.lrr = "1e-3"', "did you mean --optim.lr?"), argv=["--optim.lrr", "1e-3"]),
    Wrong("override without a value", ("--optim.lr", "null", "write --optim.lr VALUE"), argv=["--optim.lr"]),
    Wrong("override that is not a flag", ('"optim.lr=3"', "write --SECTION.FIELD VALUE"), argv=["optim.lr=3"]),
    Wrong("section given as a scalar", ("optim = 3", "write its fields below it"), {"optim": 3}),
    Wrong(
        "override of a whole section",
        ("optim is a section", "write its fields one by one: --optim.lr 0.001 --optim.eps 1e-08"),
        argv=["--optim", '{"lr": 1e-3, "eps": 1e-8}'],
    ),
    Wrong(
        "override of a section of maps and lists",
        ("is a section", "one by one: --eval.sets.m 'data/mv 1' --eval.sequences.m 3"),
        argv=["--eval", '{"sets": {"m": "data/mv 1"}, "sequences": {"m": 3}}'],
    ),
    Wrong(
        "override of a section with a list",
        ("is a section", "one by one: --optim.betas '[0.9, 0.95]'"),
        argv=["--optim", '{"betas": [0.9, 0.95]}'],
    ),
    Wrong("plugins in the YAML", ("plugin = [", "--plugin a.py --plugin 'b c.py'"), {"plugin": ["a.py", "b c.py"]}),
    Wrong(
        "an objective that there is not",
        ("must be one of next_token", "grpo is not here: no objective draws answers from the model while it trains"),
        argv=["--objective.name", "grpo"],
    ),
    Wrong("a resume that is true", ("resume = true", "write auto, none or the path"), {"resume": True}),
    # types
    Wrong("text for a number", ('optim.lr = "fast"', "must be a number"), {"optim": {"lr": "fast"}}),
    Wrong("fraction for an int", ("train.max_steps = 1.5", "write a whole number"), {"train": {"max_steps": 1.5}}),
    Wrong("bool for an int", ("train.log_every = true", "write a whole number"), {"train": {"log_every": True}}),
    Wrong("number for a bool", ("train.export = 1", "write true or false"), {"train": {"export": 1}}),
    Wrong("number for text", ("train.sample_prompt = 7", 'quotes: "7"'), {"train": {"sample_prompt": 7}}),
    Wrong("word not in the list", ('"asynk"', "did you mean async?"), {"checkpoint": {"mode": "asynk"}}),
    Wrong("one beta", ("optim.betas = [0.9]", "write a list of 2 numbers"), {"optim": {"betas": [0.9]}}),
    Wrong("map for text", ("model.revision = {", "write text"), {"model": {"revision": {"class_path": "os.system"}}}),
    Wrong(
        "null for a number",
        ("train.seed = null", "must be a whole number", "remove the line"),
        {"train": {"seed": None}},
    ),
    Wrong(
        "a mask beyond the memory",
        ("data.sequence_length = 1024", "a mask of 8 GiB", "set model.attention to varlen"),
        {
            "model": {"attention": "sdpa"},
            "data": {"isolate_documents": True, "sequence_length": 1024},
            "train": {"micro_batch": 8192, "global_batch": 16384, "accumulation": 1},
        },
    ),
    # YAML itself
    Wrong("duplicate key", ("optim.lr = 2", "line 5", "line 4", "keep one"), f"{YAML}optim:\n  lr: 1\n  lr: 2\n"),
    Wrong("broken YAML", ("not valid YAML", "line 4", "indentation"), f"{YAML}optim:\n  lr: [1\n"),
    Wrong(
        "tag",
        ("optim.lr", "!!python/name:os.system", "remove the tag"),
        f"{YAML}optim: {{lr: !!python/name:os.system x}}",
    ),
    Wrong("anchor", ("optim.lr", "no anchors", "write the value out"), f"{YAML}optim: {{lr: &a 1}}"),
    Wrong("merge key", ("no merge keys", "write the keys of the other map out"), f"{YAML}optim: {{<<: {{lr: 1}}}}"),
    Wrong("list for a run", ("[1, 2]", "a run is a map", "write `deepspeed"), "[1, 2]"),
    Wrong("empty file", ("deepspeed = null", "is required", "llmtrain init DIR"), ""),
    # values
    Wrong("negative lr", ("optim.lr = -1", "greater than 0", "3e-4"), {"optim": {"lr": -1.0}}),
    Wrong("lr of 300", ("optim.lr = 300.0", "at most 1", "3e-4 is the default"), {"optim": {"lr": 300}}),
    Wrong("a seed of 70 bits", ("train.seed = 118", "2^63 - 1", "write 0"), argv=["--train.seed", str(2**70)]),
    Wrong("a count beyond all", ("train.max_tokens = ", "at most 1e+15"), {"train": {"max_tokens": 2**60}}),
    Wrong("a limit beyond all", ("fault.timeout_s = 1e+300", "at most 1e9"), {"fault": {"timeout_s": 1e300}}),
    Wrong("escapes in a name", ("train.run_dir = ", "control characters"), {"train": {"run_dir": "a\x1b[31mb"}}),
    Wrong("no name of a run folder", ('train.run_dir = ""', "is empty", "for the default"), {"train": {"run_dir": ""}}),
    Wrong(
        "a home of nobody",
        ('data.path = "~nobody_here/x"', "~nobody_here means nothing", "write the path out"),
        {"data": {"path": "~nobody_here/x"}},
    ),
    Wrong("a home", ("train.run_dir = ", "it is your home"), {"train": {"run_dir": "~"}}),
    Wrong(
        "null in quotes",
        ('model.revision = "~"', "word for null", "write null"),
        {"model": {"revision": "~"}},
    ),
    Wrong(
        "a run folder of a variable that is not set",
        ('train.run_dir = "$NOT_SET_HERE/x"', "$NOT_SET_HERE means nothing", "set the variable", "--env-file"),
        {"train": {"run_dir": "$NOT_SET_HERE/x"}},
    ),
    Wrong("lr that is nan", ("optim.lr = NaN", "finite", "correct the number"), argv=["--optim.lr", ".nan"]),
    Wrong("beta of 1", ("optim.betas = [0.9, 1.0]", "just under 1", "[0.9, 0.95]"), {"optim": {"betas": [0.9, 1.0]}}),
    Wrong("no log points", ("train.log_every = 0", "at least 1", "10 is the default"), {"train": {"log_every": 0}}),
    Wrong("min_ratio of 2", ("schedule.min_ratio = 2", "from 0 to 1", "0.1"), {"schedule": {"min_ratio": 2}}),
    Wrong(
        "warm-up longer than the run",
        (
            "schedule.warmup_steps = 10 with train.max_steps = 5",
            "; command line)",
            "to 4 or less (0: none)",
            "more than 10",
        ),
        {"schedule": {"warmup_steps": 10}},
        argv=["--train.max_steps", "5"],
    ),
    # model and data
    Wrong(
        "no such data",
        ('data.path = "data/y"', "looked from", "llmtrain prepare --source FILES --vocab-size 512 --out data/y"),
        {"data": {"path": "data/y"}},
    ),
    Wrong(
        "unprepared data",
        ('data.path = "data"', "no manifest.json", "`llmtrain prepare --source data --vocab-size 512 --out data/data`"),
        {"data": {"path": "data"}},
    ),
    Wrong(
        "a text in place of its data",
        (
            "is a file",
            "`llmtrain prepare --source run.yaml --vocab-size 512 --out data/run`, and then write data/run here",
        ),
        {"data": {"path": "run.yaml"}},
    ),
    Wrong(
        "a dataset on the Hub",
        ("is prepared first", "`llmtrain prepare --source hf:a/b --vocab-size 512 --out data/b`"),
        {"data": {"path": "hf:a/b"}},
    ),
    Wrong("a resume of no run", ('resume = "data"', "holds no checkpoint", "or RUN/step-N"), {"resume": "data"}),
    Wrong(
        "weight of 0",
        ("data.mixture.data/x = 0", "greater than 0", "remove the folder"),
        {"data": {"path": ..., "mixture": {"data/x": 0}}},
    ),
    Wrong(
        "a weight decay below 0 by pattern",
        ("optim.weight_decay_of.*norm* = -1", "0 or greater", "line "),
        {"optim": {"weight_decay_of": {"*norm*": -1}}},
    ),
    Wrong(
        "a rate of 0 by pattern",
        ("optim.lr_factor_of.*norm* = 0", "greater than 0", "model.freeze"),
        {"optim": {"lr_factor_of": {"*norm*": 0}}},
    ),
    Wrong(
        "missing folder in a mixture",
        ('data.mixture.d/z = "d/z"', "no such folder", "llmtrain prepare --source FILES --vocab-size 512 --out d/z"),
        {"data": {"path": ..., "mixture": {"d/z": 1}}},
    ),
    Wrong(
        "an evaluation set that is not there",
        ('eval.sets.code = "d/z"', "no such folder", "llmtrain prepare --source FILES --vocab-size 512 --out d/z"),
        {"eval": {"sets": {"code": "d/z"}}},
    ),
    Wrong(
        "a mean that leaves a set's weight 0",
        ("eval.mean.x = 0", "greater than 0", "remove the line"),
        {"eval": {"sets": {"x": "data/x"}, "mean": {"x": 0}}},
    ),
    Wrong(
        "evaluation sets as a list",
        ("eval.sets = [", "must be a map", "NAME: FOLDER"),
        {"eval": {"sets": ["data/x"]}},
    ),
    Wrong(
        "choices of a folder of texts",
        ('eval.choices.mine = "data/x"', "holds no multiple-choice questions", "--format choices"),
        {"eval": {"choices": {"mine": "data/x"}}},
    ),
    Wrong(
        "no patience",
        ("train.stop_early.patience = 0", "at least 1", "3 is the default"),
        {"train": {"eval_every": 5, "stop_early": {"metric": "eval/loss", "patience": 0}}},
    ),
    Wrong(
        "a typo within a section's section",
        ("train.stop_early.patient = 2", "no such field", "did you mean train.stop_early.patience?"),
        {"train": {"eval_every": 5, "stop_early": {"metric": "eval/loss", "patient": 2}}},
    ),
    Wrong(
        "a value in place of a section's section",
        ('checkpoint.keep_best = "eval/loss"', "is a section", "`metric: ...`"),
        {"checkpoint": {"keep_best": "eval/loss"}},
    ),
    Wrong(
        "vocabulary too small",
        ("model.config.vocab_size = 100", "512 tokens", "set model.config.vocab_size to 512"),
        {"model": {"config": {"vocab_size": 100}}},
    ),
    Wrong(
        "code in the model",
        ("model.config.auto_map = {", "names Python code", "remove it"),
        {"model": {"config": {"auto_map": {"AutoModel": "evil.M"}}}},
    ),
    Wrong(
        "quantized model",
        ("model.config.quantization_config", "not supported", "remove it"),
        {"model": {"config": {"quantization_config": {"bits": 4}}}},
    ),
    Wrong(
        "no such model folder",
        ('model.pretrained = "Qwen/Q3/8B"', "no such file or folder", "or ORG/NAME on the Hub"),
        {"model": {"config": ..., "pretrained": "Qwen/Q3/8B"}},
    ),
    Wrong("no such checkpoint", ('resume = "ck"', "no such file", "write auto, none"), {"resume": "ck"}),
    # the JSON
    Wrong(
        "a scale below 0",
        ("fp16.loss_scale = -1", "must be from 0 to 4294967296", "DeepSpeed's default 0"),
        ds={"fp16": {"enabled": True, "loss_scale": -1}, "bf16": {"enabled": False}},
    ),
    Wrong("no such JSON", ('deepspeed = "zz.json"', "no such file", "llmtrain init DIR"), {"deepspeed": "zz.json"}),
    Wrong(
        "a shipped JSON", ('deepspeed = "zero2"', "run.yaml, line ", "ds_configs/zero2.json"), {"deepspeed": "zero2"}
    ),
    Wrong("broken JSON", ("not valid JSON", "ds.json, line 1", "missing comma"), ds='{"bf16" {"enabled": true}}'),
    Wrong(
        "a JSON that is cut off",
        ("ds.json is cut off: it ends in line 3, column 13", 'within "zero_optimization"', "}} is missing", "copy it"),
        ds='{"bf16": {"enabled": true},\n "zero_optimization": {\n  "stage": 2, ',
    ),
    Wrong("a comment without an end", ("deepspeed = ", "a comment /* is not closed"), ds='/* a {"bf16": {}}'),
    Wrong(
        "a JSON that is cut off within a word",
        ("ds.json is cut off: it ends in line 2, column 7", '"}} is missing'),
        ds='{"zero_optimization": {"stage": 2,\n "overl',
    ),
    Wrong(
        "a JSON that is cut off within a list",
        ("ds.json is cut off: it ends in line 1, column 53", 'within "betas"', "]}}} is missing"),
        ds='{"optimizer": {"type": "Adam", "params": {"betas": [0',
    ),
    Wrong("JSON list", ('deepspeed = "ds.json"', "one object", "llmtrain init DIR"), ds="[1]"),
    Wrong(
        "duplicate JSON key",
        ("train_batch_size = 16", "first with 8", "keep one"),
        ds='{"train_batch_size": 8, "train_batch_size": 16}',
    ),
    Wrong(
        "unknown JSON key", ("gradient_cliping = 1", "did you mean gradient_clipping?"), ds={"gradient_cliping": 1.0}
    ),
    Wrong(
        "a section of the top within another",
        ("zero_optimization.aio = {}", "move it to the top of the JSON, out of zero_optimization"),
        ds={"zero_optimization": {"stage": 2, "aio": {}}},
    ),
    Wrong(
        "autocast next to bf16",
        ("torch_autocast.enabled = true", "remove it: mixed precision is an enabled bf16 or fp16 section"),
        ds={"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}},
    ),
    Wrong("a JSON key with a blank", ('" aio" = {}', "did you mean aio?"), ds={" aio": {}}),
    Wrong("an objective with a blank", ('objective.name = " dpo"', "mean dpo?"), {"objective": {"name": " dpo"}}),
    Wrong(
        "unknown nested key",
        ("zero_optimization.stag = 2", "did you mean zero_optimization.stage?"),
        ds={"zero_optimization": {"stag": 2}},
    ),
    Wrong(
        "key in the wrong place",
        ("stage3_max_live_parameters = 1", "did you mean zero_optimization.stage3_max_live_parameters?"),
        ds={"stage3_max_live_parameters": 1},
    ),
    Wrong(
        "comment key in a section",
        ("zero_optimization._comment = ", "comments start with #"),
        ds={"zero_optimization": {"_comment": "mine"}},
    ),
    Wrong(
        "one key under both its names",
        ("zero_optimization.max_live_parameters = 2", "stage3_max_live_parameters, which the file has", "keep one"),
        ds={"zero_optimization": {"stage3_max_live_parameters": 1, "max_live_parameters": 2}},
    ),
    Wrong(
        "one section under both its names",
        ("bfloat16 = {", "another name of bf16, which the file has as well", "keep one"),
        ds={"bfloat16": {"enabled": False}},
    ),
    Wrong(
        "a number that JSON does not have",
        ('gradient_clipping = "NaN"', "ds.json, line 1", "numbers are finite", "write a finite number"),
        ds='{"train_batch_size": 8, "gradient_clipping": NaN}',
    ),
    Wrong(
        "Python's true on one line",
        ('enabled = "True"', "line 2", "lower case", "write true"),
        ds='{"train_batch_size": 8,\n "bf16": {"enabled": True}}',
    ),
    Wrong(
        "Python's true, that hjson takes for text",
        ('bf16.enabled = "True,"', "is a string", "write true, without quotes"),
        ds='{"bf16": {\n "enabled": True,\n "check_grad_overflow": true\n}}',
    ),
    Wrong(
        "DeepSpeed's compiler",
        ('compile.backend = "inductor"', "no such key", "set model.compile_layers: true"),
        ds={"compile": {"backend": "inductor"}},
    ),
    Wrong(
        "a loss scale that begins below its minimum",
        ("fp16.min_loss_scale = 32", "the loss scale begins at 2^4", "set it to 16 or less"),
        ds={"fp16": {"enabled": True, "initial_scale_power": 4, "min_loss_scale": 32}, "bf16": {"enabled": False}},
    ),
    *(
        Wrong(f"{key} {folder}", (f'{key} = "{folder}"', rule, "give the path of a folder"), nested(key, folder, {}))
        for key in ("train.run_dir", "checkpoint.dir")
        for folder, rule in (
            ("data/x", "is in the data folder data/x"),
            ("data/x/run", "is in the data folder data/x"),
            ("/", "is the root of the file system"),
        )
    ),
    *(
        Wrong(f"a run in {folder}", ("train.run_dir = ", rule, "which may be new"), {"train": {"run_dir": folder}})
        for folder, rule in (
            (".", "is no folder of a run: it holds data"),
            ("data", "is no folder of a run: it holds x"),
            ("/tmp", "is no folder of a run: all use it"),
            (str(Path("~").expanduser()), "is no folder of a run: it is your home"),
            (str(Path(__file__).parents[2]), "is no folder of a run: it holds CHANGELOG.md and "),
        )
    ),
    *(
        Wrong(
            f"checkpoints in {folder}",
            ("checkpoint.dir = ", f"is no folder of checkpoints: {rule}", "which may be new"),
            {"checkpoint": {"dir": folder}},
            before=lambda here: (here / "pictures/cat.png").touch() if (here / "pictures").mkdir() is None else None,
        )
        for folder, rule in (("pictures", "it holds cat.png"), ("/tmp", "all use it"))
    ),
    Wrong(
        "a run that would replace its own settings",
        ('train.run_dir = "mine"', "it holds config.yaml", "which may be new"),
        {"train": {"run_dir": "mine"}},
        before=_own_config,
    ),
    Wrong(
        "a file to leave at that is there",
        ('fault.preempt_file = "run.yaml"', "is there already: the run would save and leave", "delete it"),
        {"fault": {"preempt_file": "run.yaml"}},
    ),
    Wrong("a YAML as the JSON", ("looks like a run's YAML", "RUN.yaml --deepspeed DS.json"), {"deepspeed": "run.yaml"}),
    Wrong("a folder as the JSON", ("is a folder",), {"deepspeed": "data"}),
    Wrong("null as the JSON", ('deepspeed = "null"', "every run has"), argv=["--deepspeed", "null"]),
    Wrong("a JSON's text as its path", ("is the text of a JSON",), argv=["--deepspeed", '{"bf16": {}}']),
    Wrong("a JSON in UTF-16", ("is not UTF-8", "iconv -f UTF-16"), before=_utf_16),
    Wrong("a JSON with 1e400", ("larger than 1.8e308",), ds='{"gradient_clipping": 1e400}'),
    Wrong("hosts of a run that is started here", ("the hostfile of `llmtrain launch`",), argv=["--hostfile", "h"]),
    Wrong("a model for W&B", ("not here: W&B gets metrics",), argv=["--wandb_log_model", "x"]),
    Wrong(
        "a degree below 1",
        ("sequence_parallel_size = -1", "must be at least 1", "DeepSpeed's default 1"),
        ds={"sequence_parallel_size": -1},
    ),
    Wrong(
        "a scheduler without parameters",  # by DeepSpeed's defaults, which are other ones than the YAML's
        ('scheduler = {"type": "WarmupLR"', "the YAML's `schedule` alone decides", "remove the section"),
        {"schedule": {"name": "constant"}},
        {"scheduler": {"type": "WarmupLR", "params": {}}},
    ),
    Wrong(
        "a misspelt auto of optimizer",
        ('optimizer.params.weight_decy = "auto"', "did you mean optimizer.params.weight_decay?"),
        ds={"optimizer": {"type": "AdamW", "params": {"weight_decy": "auto"}}},
    ),
    Wrong(
        "removed section", ("amp = {", "DeepSpeed 0.19 has removed it", "bf16 or fp16"), ds={"amp": {"enabled": True}}
    ),
    Wrong(
        "string for an int",
        ('train_batch_size = "8"', "is a string", "remove the quotes: 8"),
        ds={"train_batch_size": "8"},
    ),
    Wrong(
        "string for a bool", ('bf16.enabled = "true"', "write true, without quotes"), ds={"bf16": {"enabled": "true"}}
    ),
    Wrong("auto for a section", ('bf16 = "auto"', 'write {"enabled": "auto"}'), ds={"bf16": "auto"}),
    Wrong("scalar for a section", ("bf16 = true", "must be a section", 'write {"enabled": true}'), ds={"bf16": True}),
    Wrong(
        "sums of an fp32 run",
        ("a run in fp32 are summed in fp32: bf16 would lose", 'write "fp32", or remove it'),
        ds={"bf16": {"enabled": False}, "communication_data_type": "bf16"},
    ),
    Wrong("stage 4", ("zero_optimization.stage = 4", "from 0 to 3", "correct"), ds={"zero_optimization": {"stage": 4}}),
    # illegal mixes
    Wrong(
        "fp16 and bf16",
        ("fp16.enabled = true", "bf16.enabled = true", "set one of them to false"),
        ds={"fp16": {"enabled": True}},
    ),
    Wrong(
        "more recomputed layers than there are",
        ("model.recompute.layers = 5", "the model has 2 decoder layers", "write all"),
        {"model": {"recompute": {"layers": 5}}},
    ),
    Wrong(
        "no recomputed layer",
        ("model.recompute.layers = 0", "must be at least 1", "all, auto or null"),
        {"model": {"recompute": {"layers": 0}}},
    ),
    Wrong(
        "some recomputed layers",
        ('model.recompute.layers = "some"', "a whole number or one of all, auto"),
        {"model": {"recompute": {"layers": "some"}}},
    ),
    *(  # contiguous_gradients: DeepSpeed would sum the gradients of different experts
        Wrong(
            f"experts with {key} at ZeRO {stage}",
            (
                f"zero_optimization.{key} = ",
                "expert_parallel.autoep_size = 2",
                f"zero_optimization.stage = {stage}",
                "remove the key, or expert_parallel",
            ),
            ds={
                "expert_parallel": {"enabled": True, "autoep_size": 2},
                "zero_optimization": {"stage": stage, key: value},
            },
        )
        for stage, key, value in (
            (1, "reduce_scatter", False),
            (2, "reduce_scatter", False),
            (1, "contiguous_gradients", False),
            (2, "contiguous_gradients", False),
            (3, "zero_hpz_partition_size", 2),
        )
    ),
    Wrong(
        "a profiler of a pipeline",
        ("flops_profiler.enabled = true", "pipeline.stages = 2", "remove them with a pipeline"),
        ds={"pipeline": {"stages": 2}, "flops_profiler": {"enabled": True}},
    ),
    Wrong(
        "one beta in the JSON",
        ("optimizer.params.betas = [0.9]  (ds.json)", "must be a list of 2 numbers", "[0.9, 0.95]"),
        ds={"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}},
    ),
    Wrong(
        "a rate in quotes in the JSON",
        ('optimizer.params.lr = "1e-4"  (ds.json)', "must be a number", "remove the quotes"),
        ds={"optimizer": {"type": "Adam", "params": {"lr": "1e-4"}}},
    ),
    Wrong(
        "a way to balance stages that there is not",
        ('pipeline.partition = "best"', "parameters or uniform", "list of layer counts"),
        ds={"pipeline": {"stages": 2, "partition": "best"}},
    ),
    Wrong(
        "layer counts for another number of stages",
        ("pipeline.partition = [2, 1, 1]", "2 stages", "sum is the model's layers"),
        ds={"pipeline": {"stages": 2, "partition": [2, 1, 1]}},
    ),
    Wrong(
        "a stage without layers",
        ("pipeline.partition = [4, 0]", "1 or more", "2 numbers"),
        ds={"pipeline": {"stages": 2, "partition": [4, 0]}},
    ),
    # both files
    Wrong(
        "batch differs",
        ("train.global_batch = 8", "run.yaml, line", "train_batch_size = 16", "ds.json", '"auto"'),
        ds={"train_batch_size": 16},
    ),
    Wrong(
        "lr differs",
        ("optim.lr = 0.001", "optimizer.params.lr = 0.002", "remove one of the two"),
        {"optim": {"lr": 0.001}},
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.002}}},
    ),
    Wrong(
        "optimizer differs",
        ('optim.name = "muon"', 'optimizer.type = "Adam"', "remove one of the two"),
        {"optim": {"name": "muon"}},
        {"optimizer": {"type": "Adam"}},
    ),
    Wrong(
        "clipping differs",
        ("optim.clip_norm = 0.5", "gradient_clipping = 1.0", '"auto"'),
        {"optim": {"clip_norm": 0.5}},
        {"gradient_clipping": 1.0},
    ),
    Wrong("optimizer unknown", ('optimizer.type = "Lamb"', '"AdamW"'), ds={"optimizer": {"type": "Lamb"}}),
    Wrong(
        "optimizer unknown, with parameters of its own",
        ('error: optimizer.type = "OneBitAdam"', '"AdamW"'),  # that alone: "error: 4 mistakes" would not match
        ds={"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 9, "cuda_aware": True, "momentum": 0.9}}},
    ),
    Wrong(
        "momentum of AdamW",
        ("optimizer.params.momentum = 0.9", "belongs to optim.name muon", "betas[0]"),
        ds={"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}},
    ),
    Wrong(
        "L2 Adam",
        ("optimizer.params.adam_w_mode = false", "remove it"),
        ds={"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
    ),
    Wrong(
        "negative lr in the JSON",
        ("optimizer.params.lr = -1.0  (ds.json)", "greater than 0", "3e-4"),
        ds={"optimizer": {"type": "Adam", "params": {"lr": -1}}},
    ),
    Wrong(
        "a scheduler with values",
        ("alone decides the learning rate", "schedule.name: linear, schedule.min_ratio: 0, schedule.warmup_steps: 20"),
        {"schedule": {"name": "linear", "min_ratio": 0, "warmup_steps": 10}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": "auto"}}},
    ),
    # what trains
    *(
        Wrong(
            f"a key that does not work here: {key}",
            (f"{key} = {json.dumps(value)}", *says),
            {},
            nested(key, value, {"zero_optimization": {"stage": stage}}),
        )
        for stage, key, value, says in (
            (1, "zero_optimization.allgather_bucket_size", 1001, ("a multiple of 2", "write 1002")),
            (1, "bf16.loss_scale", 0, ("no such key", "bf16 has the range of fp32, and no loss scale")),
            (1, "zero_optimization.offload_optimizer.device", "gpu", ("must be cpu or none", 'write "cpu"')),
            (1, "data_types.grad_accum_dtype", "fp16", ("a run in bf16", 'write "fp32" or "bf16"')),
            (1, "data_types.param_dtype", "fp32", ("the parameters are bf16", 'write "bf16"')),
            (1, "communication_data_type", "int8", ("fp32, bf16 or fp16", 'write "fp32"')),
            (1, "expert_parallel.autoep_sise", 2, ("no such key", "did you mean expert_parallel.autoep_size?")),
            (1, "expert_parallel.enabled", True, ("without autoep_size", "write autoep_size")),
            (1, "tensor_parallel.tp.tp_sise", 2, ("no such key", "did you mean tensor_parallel.tp.tp_size?")),
            (1, "data_efficiency.sed", 2, ("no such key", "did you mean data_efficiency.seed?")),
        )
    ),
    # the batch equation
    Wrong(
        "accumulation not whole",
        (
            "global_batch 10 = micro_batch 4 x accumulation ? x data-parallel 2 -> accumulation 1.25: not whole",
            "world size 2 (--world-size)",
            "8 or 16",
        ),
        {"train": {"global_batch": 10, "micro_batch": 4}},
    ),
    Wrong(
        "micro-batch not whole",
        ("global_batch 10 = micro_batch ? x accumulation 1 x data-parallel 4 -> micro_batch 2.5", "8 or 12"),
        {"train": {"global_batch": 10, "micro_batch": ...}},
        ranks=4,
    ),
    Wrong("batch smaller than the ranks", ("-> accumulation 0.5: not whole", "a global_batch of 16"), ranks=8),
    Wrong(
        "three numbers that disagree",
        ("global_batch 8 = micro_batch 2 x accumulation 3 x data-parallel 2 -> 12: not equal", "global_batch of 12"),
        {"train": {"accumulation": 3}},
    ),
    Wrong(
        "world size that is no number", ('--world-size = "two"', "write --world-size 8"), argv=["--world-size", "two"]
    ),
]
