"""Checks of what a run names on disk: packages, prepared folders, models, checkpoints, and the run's own folder."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import asdict
from glob import escape, glob
from pathlib import Path
from typing import Any

import xxhash

from llmtrain import features
from llmtrain.base import untrusted
from llmtrain.base.errors import DataError
from llmtrain.base.redact import redact_text
from llmtrain.config.problems import Places, Problems, stop
from llmtrain.config.run import RunConfig, stage_views
from llmtrain.objectives.objective import Objective
from llmtrain.storage.addresses import COMMIT, is_remote, is_url


def check_on_disk(config: RunConfig, problems: Problems) -> None:
    """Check packages, paths, prepared folders, and that the tokenizer fits into the model's vocabulary."""
    _check_packages(config, problems)
    data_vocab: dict[str, int] = {}
    for stage, key_of in stage_views(config):
        for path in stage.data.folders:
            key = key_of("data.path" if stage.data.path else f"data.mixture.{path}")
            if key in problems or (manifest := _read_manifest(key, path, config, problems)) is None:
                continue
            if isinstance(vocab := manifest.get("vocab_size"), int):
                data_vocab[path] = vocab
            _check_length(key, path, manifest, stage, problems)
            _check_kind(config, key, path, manifest, problems)
    for field, folders in (("sets", config.eval.sets), ("choices", config.eval.choices)):
        for name, path in folders.items():
            key = f"eval.{field}.{name}"
            if (manifest := _read_manifest(key, path, config, problems)) is not None:
                _check_measured(field, key, path, manifest, config, problems)
    check_teacher_folder(config, problems)
    model = model_config(config, problems)
    models = {"model.pretrained": config.model.pretrained, "objective.teacher": config.objective.teacher}
    for key, folder in {**models, "adapter.start": config.adapter.start}.items():
        if folder is not None and not is_remote(folder):
            check_tokenizer(config, key, folder, Path(folder), problems)
    if config.resume not in ("auto", "none") and not has_checkpoints(config):
        _check_resume(config.resume, problems)
    _check_run_dir(config, problems)
    exported = {} if config.train.export_to is None else {"train.export_to": config.train.export_to}
    for key, url in (features.stores(config) | exported).items():
        _is_usable(key, url, problems, writes=True)
    model_vocab = config.model.vocabulary or (model or {}).get("vocab_size")
    key, given, room = "model.pretrained", config.model.pretrained, "model.vocabulary"
    if config.model.config is not None:
        key = room = "model.config.vocab_size"
    for path, vocab in data_vocab.items():
        if isinstance(model_vocab, int) and model_vocab < vocab:
            problems.add(
                key,
                given if key == "model.pretrained" else model_vocab,
                f"the tokenizer of {path} has {vocab} tokens, the model room for {model_vocab}",
                f"set {room} to {vocab} or more, or prepare the data with the model's tokenizer",
            )


def check_tokenizer(config: RunConfig, key: str, given: str, folder: Path, problems: Problems) -> None:
    """Refuse a model whose tokenizer gives a text other ids than the data's tokenizer; note another beginning of texts.

    A folder without tokenizer.json is not checked. `given`: the value of `key`. `folder`: the model's files.
    """
    file, data = folder / "tokenizer.json", next(iter(config.data.folders), "")
    if not file.is_file() or not data:
        return
    from llmtrain.config.encoding import difference, special_tokens  # most runs begin without a model
    from llmtrain.storage.object_store import Store

    read = Store(data).read if is_url(data) else lambda name: (Path(data) / name).read_bytes()
    try:
        manifest = untrusted.loads(read("manifest.json"))
        texts, was = manifest.get("chat") is None, manifest["tokenizer_fingerprint"]
        of_data = read("tokenizer/tokenizer.json")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # who opens the data reports it
    try:
        of_model = file.read_bytes()
        same = was == xxhash.xxh3_128_hexdigest(of_model)
        reason = "" if same else difference(of_data, of_model, grown=key != "objective.teacher")
        first = special_tokens(of_model)[0] if texts and not reason else []
    except (OSError, DataError) as error:
        reason = f"its tokenizer cannot be compared with that of {redact_text(data)}: {error}"
        problems.add(key, given, reason, "copy its tokenizer.json again")
        return
    if reason:
        remedy = f"prepare the data with --tokenizer {given}, or name a model of the data's tokenizer"
        problems.add(key, given, f"its tokenizer differs from that of {redact_text(data)}: {reason}", remedy)
    elif texts and first != (begin := manifest.get("first_tokens", [])):
        how = "begin with other tokens than those of" if begin else "lack the tokens that begin a text in"
        problems.notes.append(
            f"{key}: the texts of {redact_text(data)} {how} its tokenizer; prepare them again with "
            f"--tokenizer {given}, unless the model was trained so"
        )


def _check_packages(config: RunConfig, problems: Problems) -> None:
    for name, tracker in config.trackers.items():
        packages = {module.partition(".")[0] for module in tracker.MODULES}
        if missing := sorted(package for package in packages if importlib.util.find_spec(package) is None):
            is_built_in = type(tracker).__module__.startswith("llmtrain.")
            what = f"'llmtrain[{name}]'" if is_built_in else " ".join(missing)
            reason = f"needs {', '.join(missing)}, not installed here"
            problems.add(f"trackers.{name}", asdict(tracker), reason, f"pip install {what} on all hosts")


def refuse_if_preempted(config: RunConfig, places: Places) -> None:
    """Raise ConfigError if the file `fault.preempt_file` exists before the run.

    The ranks do not call this: if the file appears while they start, they save and end as at any other time.
    """
    if (file := config.fault.preempt_file) and os.path.exists(file):
        key = "fault.preempt_file"
        rule = "exists already: the run would save and stop before its first step"
        raise stop(key, file, rule, "delete it, or name a file that does not exist yet", places.get(key))


def _check_length(key: str, path: str, manifest: dict[str, Any], config: RunConfig, problems: Problems) -> None:
    """Refuse a split with fewer than sequence_length + 1 tokens: one more for the last label.

    Rows, such as conversations, are padded, so that one is enough.
    """
    length, tokens, chat = config.data.sequence_length, manifest.get("tokens"), manifest.get("chat")
    if _format_of(manifest) == _QUESTIONS:  # `_check_kind` refuses it
        return
    least = 1 if isinstance(chat, dict) else length + 1
    remedies = {
        "train": "prepare more text",
        "validation": "prepare it with a larger --validation-fraction or with --validation-source FILE, or set "
        "train.eval to off to train without validation",
    }
    for split, remedy in remedies.items():
        count = tokens.get(split) if isinstance(tokens, dict) else None
        if isinstance(count, int) and count < least and (split == "train" or config.train.eval):
            remedy = f"lower data.sequence_length to {count - 1} or less, or {remedy}" if count > 2 else remedy
            rule = f"its {split} split ({count} tokens) does not fill one sequence of data.sequence_length {length}"
            problems.add(key, path, rule, remedy)


def _check_kind(config: RunConfig, key: str, path: str, manifest: dict[str, Any], problems: Problems) -> None:
    """Refuse data in a format that the objective cannot train on."""
    format, name, wants = _format_of(manifest), config.objective.name, config.objective.data
    comparing = [each for each, chosen in Objective.CHOICES.items() if chosen.data == format]
    if format == _QUESTIONS:
        rule, remedy = "multiple-choice questions, which are for evaluation only", "name it in eval.choices"
    elif wants != "text" and format != wants:
        rule = f"no data of --format {wants}, which objective.name {name} needs"
        remedy = f"prepare them with --format {wants}, or remove objective.name"
    elif wants == "text" and format != "text" and comparing:
        rule = f"answers to compare (--format {format}), and objective.name {name} would train on the worse ones too"
        remedy = f"set objective.name to one of {', '.join(comparing)}"
    else:
        return
    problems.add(key, path, f"holds {rule}", remedy)


_QUESTIONS = "choices"
"""The format of the folders in eval.choices."""


def _format_of(manifest: dict[str, Any]) -> str:
    """Return the --format that a folder was prepared with; "text" if the manifest names none."""
    settings = manifest.get("settings")
    return str(settings.get("format", "text")) if isinstance(settings, dict) else "text"


def _check_measured(
    field: str, key: str, path: str, manifest: dict[str, Any], config: RunConfig, problems: Problems
) -> None:
    """Check a folder of eval.sets or eval.choices."""
    tokens, chat, length = manifest.get("tokens"), manifest.get("chat"), config.data.sequence_length
    if field == "sets":
        _check_kind(config, key, path, manifest, problems)
    elif _format_of(manifest) != _QUESTIONS:
        remedy = "prepare them with --format choices, or name the folder in eval.sets"
        problems.add(key, path, "holds no multiple-choice questions", remedy)
        return
    least = 1 if isinstance(chat, dict) else length + 1
    sizes = [count for count in tokens.values() if isinstance(count, int)] if isinstance(tokens, dict) else []
    if field == "sets" and sizes and max(sizes) < least:
        tokens = " and ".join(map(str, sizes))
        reason = f"neither of its splits ({tokens} tokens) fills one sequence of data.sequence_length {length}"
        problems.add(key, path, reason, "prepare more text, or lower data.sequence_length")


def starts_from_model(config: RunConfig) -> bool:
    """Return True if the parameters come from the model section, and not from a checkpoint."""
    return config.resume in ("auto", "none") and not has_checkpoints(config)


def reads_weights(config: RunConfig) -> bool:
    """Return True if the run reads the weights of model.pretrained: at its first start, or for frozen parameters."""
    return (
        starts_from_model(config)
        or bool(config.model.freeze or config.model.train_only)
        or config.adapter.r is not None
    )


def has_checkpoints(config: RunConfig) -> bool:
    """Return True if the run's folder has checkpoints: then a start resumes, and needs no files of model.pretrained."""
    places = glob(f"{escape(str(config.train.run_dir))}/checkpoints/step-*")
    return any(re.fullmatch(r"step-[0-9]+", os.path.basename(place)) for place in places)


def _check_resume(path: str, problems: Problems) -> None:
    """Check that `path` is a checkpoint, a folder with checkpoints or RUN/step-N; a URL's content is checked later."""
    if is_url(path):
        _is_usable("resume", path, problems)
        return
    step = re.fullmatch(r"step-([0-9]{1,18})", Path(path).name)
    if step and not os.path.exists(path):
        full = f"step-{int(step[1]):08d}"
        if any(os.path.isdir(Path(path).parent / below / full) for below in ("", "checkpoints")):
            return
    if not _exists("resume", path, "write auto, none or the path of a checkpoint", problems):
        return
    inside = any(glob(f"{escape(path)}/{below}step-*") for below in ("", "checkpoints/"))
    if not (inside or Path(path).name.startswith("step-") or os.path.exists(f"{path}/manifest.json")):
        problems.add("resume", path, "holds no checkpoint", "give a run's folder, a checkpoint's folder, or RUN/step-N")


def _check_run_dir(config: RunConfig, problems: Problems) -> None:
    """Check that the folders for the run and its checkpoints can be made and hold nobody else's files.

    Whether they can be written is only known on rank 0's host.
    """
    sources = [*(config.data.mixture or {}), *([config.data.path] if config.data.path else [])]
    sources += [*config.eval.sets.values(), *config.eval.choices.values()]
    for key, path in (("train.run_dir", config.train.run_dir), ("checkpoint.dir", config.checkpoint.dir)):
        if path is None:
            continue
        nearest = next((p for p in (Path(path), *Path(path).parents) if os.path.exists(p)), Path("/"))
        rule = None
        if "\0" in path:
            rule = "has a null character, which no path can have"
        elif not os.path.isdir(nearest):
            rule = f"{nearest} is a file, so no folder can be there"
        elif os.path.realpath(nearest).split("/")[1] in ("proc", "sys"):
            rule = f"{os.path.realpath(nearest)} belongs to the kernel, which allows no new folder there"
        elif os.path.realpath(path) == "/":
            rule = "is the root of the file system, and a run writes files of its own there"
        elif source := next((s for s in sources if _within(path, s)), None):
            rule = f"is in the data folder {source}, which a run only reads"
        elif other := _of_others(path, _RUN if key == "train.run_dir" else _CHECKPOINTS):
            kind = "a run" if key == "train.run_dir" else "checkpoints"
            rule = f"does not look like a folder of {kind}: {other}; a run would replace and delete files there"
        if rule:
            problems.add(key, path, rule, "give the path of a folder, which may be new")


_RUN = re.compile(r"checkpoints|events\.jsonl|environment\.json")
"""A folder with one of these is a run's; `checkpoints` is made before all other files."""
_CHECKPOINTS = re.compile(r"step-[0-9].*")
_REPLACED = ("config.yaml", "deepspeed.json")
"""Files that a run replaces at each start."""
_OF_A_LAUNCH = re.compile(r"\..*|.*\.(log|out|err|sh|ya?ml|json)|logs?|wandb|lost\+found")
"""Files that may be in a run's folder before the run: hidden files, logs and settings of the launch."""


def _of_others(path: str, own: re.Pattern[str]) -> str | None:
    """Return the reason why a folder seems to hold files that are not of a run; None: it does not seem to.

    A folder with a file whose name matches `own` is a run's.
    """
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return None
    shared = {
        os.path.realpath(os.path.expanduser("~")): "it is your home",
        os.path.realpath("/tmp"): "all users share it",
    }
    if sign := shared.get(os.path.realpath(path)):
        return sign
    if any(map(own.fullmatch, names)):
        return None
    other = [name for name in names if name in _REPLACED or not _OF_A_LAUNCH.fullmatch(name)]
    return f"it holds {other[0]}" + (f" and {len(other) - 1} more" if other[1:] else "") if other else None


def _within(path: str, folder: str) -> bool:
    inner, outer = os.path.realpath(path), os.path.realpath(folder)
    return inner == outer or inner.startswith(f"{outer.rstrip('/')}/")


_AGAIN = "make or copy the folder again"


def _read_manifest(key: str, path: str, config: RunConfig, problems: Problems) -> dict[str, Any] | None:
    folder, model = Path(path), config.model
    size = model.config.get("vocab_size") if isinstance(model.config, dict) else None
    ids = f"--tokenizer {model.pretrained}" if model.pretrained else f"--vocab-size {size or 8192}"
    manifest = folder / "manifest.json"
    if is_url(path):
        return _read_in_store(key, path, problems) if _is_usable(key, path, problems) else None
    if not os.path.exists(path):
        rule = "a dataset on the Hub is prepared first" if path.startswith("hf:") else "no such folder"
        rule, remedy = f"{rule} (looked from {Path.cwd()})", _to_prepare(path, None, ids)
    elif not os.path.isdir(path):
        rule, remedy = "is a file, and training reads a folder that was made of it", _to_prepare(path, path, ids)
    elif not manifest.is_file() and (folder / "unfinished").is_dir():
        rule, remedy = "its preparation has not ended: it has no manifest.json", "run the same `llmtrain prepare` again"
    elif not manifest.is_file() and (folder / "config.json").is_file():
        rule, remedy = "is the folder of a model and no data", "name it in model.pretrained, and prepared data here"
    elif not manifest.is_file():
        rule, remedy = "not a prepared folder: it has no manifest.json", _to_prepare(path, path, ids)
    else:
        return _json_object(key, str(manifest), manifest, _AGAIN, problems)
    problems.add(key, path, rule, remedy)
    return None


def _read_in_store(key: str, url: str, problems: Problems) -> dict[str, Any] | None:
    from llmtrain.storage.object_store import Store, StoreError

    shown = redact_text(url)
    try:
        data = Store(url).read("manifest.json")
        return _json_object(key, shown, data, "upload the folder again", problems, "its manifest.json ")
    except FileNotFoundError:
        mistake = "no prepared folder: it has no manifest.json", "correct the URL, or upload the folder again"
    except StoreError as error:
        remedy = "correct address or access; credentials are those of the store's driver"
        mistake = f"cannot be read ({error})", remedy
    problems.add(key, shown, *mistake)
    return None


def _is_usable(key: str, url: str, problems: Problems, *, writes: bool = False) -> bool:
    """Report a wrong URL of a store, without using the network. Returns True if it is right."""
    from llmtrain.storage.object_store import problem_of  # most runs name no store

    if problem := problem_of(url, writes=writes):
        problems.add(key, redact_text(url), *problem)
    return problem is None


def _to_prepare(path: str, source: str | None, ids: str) -> str:
    """Return the remedy with the command that prepares `source` (None: unknown). `ids`: the flags of its tokenizer."""
    if source is None and not path.startswith("hf:"):
        return f"make it with `llmtrain prepare --source FILES {ids} --out {path}`, or correct the path"
    stem = Path(path.removeprefix("hf:")).name.partition(".")[0] or "mine"
    out = next(each for each in (f"data/{stem}", f"data/{stem}-tokens") if os.path.normpath(path) != each)
    source = source or path
    return f"make one: `llmtrain prepare --source {source} {ids} --out {out}`, and then write {out} here"


def model_config(config: RunConfig, problems: Problems) -> dict[str, Any] | None:
    """Return the fields of the model's config.json; None: it is not on this host, or cannot be read."""
    if isinstance(config.model.config, dict):
        return config.model.config
    key, path = (
        ("model.config", config.model.config) if config.model.config else ("model.pretrained", config.model.pretrained)
    )
    if not path:
        return None
    if key == "model.pretrained" and is_remote(path):
        _check_url(key, path, config.model.revision, problems)
        return None  # what the Hub or a store has is looked at when it has been fetched: `with_base`
    remedy = "give a local Hugging Face folder"
    if not _exists(key, path, remedy if config.model.config else f"{remedy}, or ORG/NAME on the Hub", problems):
        return None
    _check_revision("model.revision", config.model.revision, path, problems)
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        problems.add(key, path, *(_no_model(file.parent) or ("the folder has no config.json", remedy)))
        return None
    return _json_object(key, str(file), file, _AGAIN, problems)


def _no_model(folder: Path) -> tuple[str, str] | None:
    """Return rule and remedy for a folder known to hold something other than a model; None: it may hold one."""
    if (folder / "adapter_config.json").is_file():
        return "is the folder of an adapter, without its model", (
            "merge the two (llmtrain checkpoint to-hf RUN OUT --merge) and name that folder, or name the model here "
            "and this folder in adapter.start"
        )
    if (folder / "export/config.json").is_file():
        return "is the folder of a run", f"name its export, {folder}/export"
    if (folder / "checkpoints").is_dir() or (folder / "trainer.json").is_file():
        return "is of a run", f"export it with `llmtrain checkpoint to-hf {folder} OUT`, and name OUT here"
    if (folder / "manifest.json").is_file():
        return "is prepared data and no model", "name it in data.path, and the model's folder here"
    return None


def _exists(key: str, path: str, remedy: str, problems: Problems) -> bool:
    # os.path, because Path.exists raises for a name that is too long
    if os.path.exists(path):
        return True
    problems.add(key, path, f"no such file or folder (looked from {Path.cwd()})", remedy)
    return False


def _json_object(
    key: str, shown: str, file: Path | bytes, remedy: str, problems: Problems, what: str = ""
) -> dict[str, Any] | None:
    """Return the JSON object in a file; None, with a problem added: it holds none. `what`: beginning of the rule."""
    try:
        tree = untrusted.loads(file if isinstance(file, bytes) else file.read_bytes(), infinite=True)
    except (OSError, ValueError) as error:
        problems.add(key, shown, f"{what}cannot be read as JSON: {error}", remedy)
        return None
    if not isinstance(tree, dict):
        problems.add(key, shown, f"{what}must hold one JSON object", remedy)
        return None
    return tree


def check_teacher_folder(config: RunConfig, problems: Problems) -> None:
    """Refuse a local teacher folder without a model's files. A Hub repository is checked when it has been fetched."""
    key, folder, revision = "objective.teacher", config.objective.teacher, config.objective.teacher_revision
    if folder is None or is_remote(folder):
        _check_url(key, folder, revision, problems)
    elif not os.path.isfile(os.path.join(folder, "config.json")):
        missing = f"no such folder with a config.json (looked from {os.getcwd()})"
        remedy = "give a local Hugging Face folder, or ORG/NAME on the Hub"
        problems.add(key, folder, *(_no_model(Path(folder)) or (missing, remedy)))
    else:
        _check_revision(f"{key}_revision", revision, folder, problems)


def _check_revision(key: str, revision: str | None, folder: str, problems: Problems) -> None:
    if revision is not None:
        reason = f"is for a name on the Hub, but {folder} is a folder on this machine"
        problems.add(key, revision, reason, "remove it, or write ORG/NAME of a repository")


def _check_url(key: str, given: str | None, revision: str | None, problems: Problems) -> None:
    """Check the URL of a model, and refuse a revision other than a commit from a run's record."""
    if given is None or not is_url(given):
        return
    if _is_usable(key, given, problems) and revision is not None and not COMMIT.fullmatch(revision):
        where = f"{key.rpartition('.')[0]}.{'teacher_' if key.endswith('teacher') else ''}revision"
        problems.add(where, revision, f"goes with a name on the Hub, and {key} is a URL", "remove it")
