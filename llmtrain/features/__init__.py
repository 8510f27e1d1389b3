"""Features of a run that the core does without. Each is a folder here, and deleting the folder removes the feature.

A folder's `__init__.py` has a class derived from `Feature`: what the feature adds to the core. It imports nothing but
the classes of sections, which each program that reads a YAML needs; methods import the rest where a run asks for it. No
other file of the package imports a feature; ORDER of training/run.py names those with a part. A new feature is a new
folder, and a line there if it has a part.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from llmtrain.base.choice import Rules


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a feature knows of a run before its steps."""

    tensors: int
    """Bytes of tensors on rank 0, at their peak."""
    sent_to_other_hosts: float
    """Bytes that a rank sends to other hosts in a step, at most."""
    step_s: Mapping[str, float]
    """Part of a step -> seconds; empty: they are not known."""
    memory: Mapping[str, str]
    """Phase of the heartbeat, or "setup" -> what to say of a rank whose memory runs out in it."""


class Feature:
    """What a feature's folder adds to the core. The default of each method adds nothing.

    `config` is the RunConfig, `run` the Run, `launch` the Launch of training/parts.py: of modules that import this one.
    A method whose docstring speaks of a run with the feature is called only where `asked` is true; the other methods
    are called for each feature.
    """

    name: ClassVar[str]
    """Name of the folder, of the part in ORDER (training/run.py), and of the page in docs."""
    section: ClassVar[type[Any] | None] = None
    """The frozen dataclass of the YAML's section; of a section of choices its base class."""
    key: ClassVar[str] = ""
    """The section in the YAML; empty: as `name`."""
    default: ClassVar[type[Any] | None] = None
    """The class of a section of choices that a YAML without the section has."""
    entries: ClassVar[tuple[type[Any], ...]] = ()
    """Classes that a section with any number of entries may name, such as `trackers`; their definition is enough."""
    renamed: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(key that another section had for a field, its key now), for the message about an unknown field."""
    idle: ClassVar[str] = ""
    """Why keys of the section have no effect in a run that does not ask for the feature."""
    observes: ClassVar[bool] = False
    """Its section changes no number of a step: replays and proofs leave it out."""
    left_out: ClassVar[Any] = None
    """The section of a run without the feature, if that is not the section's default."""
    reorders: ClassVar[bool] = False
    """It changes only the order of a step's sums: proofs leave it out."""
    measures: ClassVar[bool] = False
    """An evaluation calls its part, so that a run evaluates even if it measures nothing else."""
    most_sequences: ClassVar[int] = 1
    """A forward pass has at most this many times `train.micro_batch` sequences; 1: all micro-batches have one shape."""
    variants: ClassVar[tuple[str, ...]] = ()
    """Names of the `variants` of its part. A checkpoint has their values as kinds OUTER + name (checkpoint/format.py),
    and the part's entry under the same name."""
    decides: ClassVar[tuple[str, ...]] = ()
    """Keys with the value auto that `decided` replaces."""
    commands: ClassVar[tuple[tuple[str, str, str], ...]] = ()
    """Commands of the command line: (name, module with its `main`, what it does). A name may be a command of the core
    with a flag, such as `init --from`: with the flag the words go to this module."""
    agent: ClassVar[str] = ""
    """Module of a process beside the ranks of each host; local rank 0 starts it, as base/rank/watched.py says."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Packages whose versions the record of a run has."""
    passes_on: ClassVar[bool] = False
    """Its commands pass their environment on to other hosts, so that nothing is set in it for this one."""

    def answers(self) -> Iterable[tuple[str, str, str]]:
        """Options of other training stacks, explained in messages about an unknown key or value. Each is (the stack, or
        empty if several have the option; the option; llmtrain's equivalent, in Markdown)."""
        return ()

    def subcommands(self, command: str, add: Callable[..., Any]) -> None:
        """Add commands to one of the core that has several, such as `checkpoint`. `add(name, run, what it does)`
        returns the parser of a new one; `run` gets what it has parsed."""

    def options(self, command: str, add: Callable[..., Any]) -> None:
        """Add options to a command of the core, such as `checkpoint to-hf`. `add`: add_argument of its parser."""

    def before_command(self, command: str, args: Any) -> Callable[[Any], None] | None:
        """Examine what a command with options of features has parsed, before it begins. Returns what is called with the
        command's result in the end, if anything. Raises UserError."""
        return None

    def asked(self, config: Any) -> bool:
        """True for a run that has the feature: that asks for it, and not only may have it."""
        return False

    def rules(self) -> Rules:
        """Rules that are checked if the YAML changes the section, or if a run has the feature."""
        return Rules()

    def notes(self, run: Any) -> Iterable[str]:
        """Lines at the start of a run that has the feature."""
        return ()

    def summary(self, run: Any) -> Iterable[str]:
        """Lines of `config check` and `config show`."""
        return ()

    def expected(self, run: Any, *, on_gpu: bool) -> Expected | None:
        """Return what is known of the run on such ranks, of this host's files; None: nothing."""
        return None

    def decided(self, run: Any, ranks: Any, *, trains: bool) -> Any:
        """Return the run with the values that its ranks decide, the same on all. Called after the ranks have met,
        before the model is built.

        `trains`: False for passes over the data alone.

        Raises: UserError, on all ranks: the run is not to start on them.
        """
        return run

    def explain(self, error: Exception, run: Any, device: Any) -> str:
        """Return what to tell the user about an exception that ends a rank; empty: nothing."""
        return ""

    def check_model(self, config: Any, model: Any, problems: Any) -> None:
        """Add to the Problems why the PreTrainedModel, without values, cannot train in a run with the feature."""

    def check_data(self, config: Any, data: Any) -> None:
        """Examine the TrainData of the first stage, before the model, for a run with the feature. Raises DataError."""

    def stores(self, config: Any) -> Mapping[str, str]:
        """Return the URLs of folders in object stores to which a run with the feature writes, by their keys."""
        return {}

    def disks(self, run: Any) -> Mapping[str, str]:
        """Return the folders, on a disk of each host, that the ranks write and read in each step, by their keys."""
        return {}

    def before_resume(self, config: Any, checkpoints: Any, ranks: Any) -> None:
        """Called on all ranks together before a run with the feature looks for a checkpoint to resume from.
        `checkpoints`: its CheckpointFolder. Raises: AgreedError."""

    def part(self, launch: Any) -> Any:
        """Make the Part of a run that has the feature; None: it needs none, as on one rank."""
        return self.part_of(launch.setup)

    def part_of(self, setup: Any) -> Any:
        """Make the Part if the run's Setup is all that it needs: plans and proofs of parity have it, too."""
        return None

    def shortened(self, section: Any, steps: int) -> Any:
        """Return the section for a proof of few steps."""
        return section

    def plain(self, config: Any) -> Any:
        """Return what the reference of a proof of parity calls with 0 and the first masters, and after each update with
        the step and the masters (name -> tensor). It returns the values of `variants` by their names, computed by their
        definition. None: there are none."""
        return None

    def tracker(self, section: Any) -> Any:
        """Make the Sink of a run with this section, on rank 0; None: it has none."""
        return None

    def run_id(self) -> str:
        """The id that the environment gives a new run, in which its trackers group its launches; empty: none."""
        return ""

    def before_launch(self, run: Any, words: Sequence[str], hosts: Sequence[Any], port: int) -> str | None:
        """Examine the hosts of a launch before ranks start on several: once, not before a restart.

        Args:
            words: its command line.
            hosts: the Host of each.
            port: of the rendezvous.

        Returns: the first host's address as the others know it, if known.

        Raises: ConfigError: the launch is not to start.
        """
        return None

    def at_end(self, data: Any, tracker: Any) -> Iterable[tuple[str, str]]:
        """Tell what belongs to the figures of a complete run with the feature, on rank 0. Returns its last lines:
        (label, text). `data`: the TrainData of the last stage; `tracker`: the run's Tracker."""
        return ()

    def reads_json(self, tree: Any, refuse: Callable[[str, Any, str, str], None]) -> Collection[str]:
        """Return dotted keys of a DeepSpeed JSON, as written, that the feature reads, where the core would refuse their
        values or call them unread. `refuse`: adds a mistake: key, value, rule, remedy."""
        return ()

    def building(self, run: Any, spec: Any, ranks: Any) -> AbstractContextManager[Any]:
        """A context in which DeepSpeed makes the model of the ModelSpec and its engine; it gives the Run, whose JSON
        may be another. Raises: AgreedError."""
        return nullcontext(run)

    def state(self, engine: Any) -> Any:
        """Make the State (engine/deepspeed/state.py) of a DeepSpeed engine that keeps its optimizer elsewhere; None:
        the core knows it."""
        return None

    def unrepeatable(self, config: Any) -> str:
        """Why steps of a run with the feature cannot be trained again from a checkpoint; empty: they can."""
        return ""

    def keeps(self, checkpoints: Path) -> Iterable[Path]:
        """Complete checkpoints in the folder that a save does not delete, whatever `checkpoint.keep` says."""
        return ()

    def metrics(self) -> Mapping[str, Any]:
        """Keys of metrics.jsonl that its part logs, and the MetricKey of each."""
        return {}

    def facts(self, events: Callable[[str], list[dict[str, Any]]]) -> Iterable[tuple[str, str]]:
        """Lines of a report: (label, text). `events`: maps a kind to the run's events of this kind, in order."""
        return ()


@functools.cache
def features() -> dict[str, Feature]:
    """Every feature by its name, in the order of the names."""
    by_name = {}
    for folder in sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg):
        feature: Feature = importlib.import_module(f"{__name__}.{folder}").FEATURE
        type(feature).name, type(feature).key = folder, feature.key or folder
        by_name[folder] = feature
    return by_name


@functools.cache
def names_of_sections() -> dict[type[Any], str]:
    return {feature.section: feature.key for feature in features().values() if feature.section is not None}


def asked(config: Any) -> list[Feature]:
    """The features that a run has."""
    return [feature for feature in features().values() if feature.asked(config)]


def defaults() -> dict[str, Any]:
    """Section -> its object in a run without it, for all features with a section."""
    classes = {feature.key: feature.default or feature.section for feature in features().values()}
    return {key: section() for key, section in classes.items() if section is not None}


def variants() -> list[str]:
    return [name for feature in features().values() for name in feature.variants]


def observing() -> dict[str, Any]:
    """Return the sections that leave out the features that only observe."""
    return {
        feature.key: feature.left_out or defaults()[feature.key]
        for feature in features().values()
        if feature.observes and feature.section is not None
    }


def trackers(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Make the Sinks of features by the keys that the YAML has for them. `sections`: the run's by their names; maps of
    fields, such as JSON has kept, will do. Raises TypeError: a map of another version."""
    sinks = {}
    for feature in features().values():
        tracks = type(feature).tracker is not Feature.tracker
        if tracks and feature.section is not None and (section := sections.get(feature.key)):
            section = feature.section(**section) if isinstance(section, Mapping) else section
            sinks[f"{feature.key}.{feature.name}"] = feature.tracker(section)
    return {key: sink for key, sink in sinks.items() if sink is not None}


def run_id() -> str:
    """The id that the environment gives a new run; empty: none."""
    return next(filter(None, (feature.run_id() for feature in features().values())), "")


def packages() -> tuple[str, ...]:
    return tuple(package for feature in features().values() for package in feature.packages)


def parts_of(setup: Any) -> list[Any]:
    """Make the parts of features that need only a Setup, in the order of the names."""
    return [part for feature in asked(setup.run.config) if (part := feature.part_of(setup)) is not None]


def shortened(config: Any, steps: int) -> dict[str, Any]:
    """Return the sections for a proof of few steps, without what it leaves out."""
    without = defaults() | observing()
    return {
        key: without[key] if feature.observes or feature.reorders else feature.shortened(getattr(config, key), steps)
        for feature in features().values()
        if (key := feature.key) in without
    }


def most_sequences(config: Any) -> int:
    return max((feature.most_sequences for feature in asked(config)), default=1)


def decides() -> list[str]:
    return [key for feature in features().values() for key in feature.decides]


def decided(run: Any, ranks: Any, *, trains: bool = True) -> Any:
    """Ask each feature, as its method says. Raises UserError, on all ranks."""
    for feature in features().values():
        run = feature.decided(run, ranks, trains=trains)
    return run


def reads_json(tree: Any, refuse: Callable[[str, Any, str, str], None]) -> set[str]:
    return {key for feature in features().values() for key in feature.reads_json(tree, refuse)}


@contextmanager
def building(run: Any, spec: Any, ranks: Any) -> Iterator[Any]:
    """Enter the `building` context of each feature, and yield the run as they have changed it. Raises AgreedError."""
    with ExitStack() as stack:
        for feature in features().values():
            run = stack.enter_context(feature.building(run, spec, ranks))
        yield run


def state(engine: Any) -> Any:
    """Return the first feature's State of a DeepSpeed engine; None: no feature has one."""
    return next(filter(None, (feature.state(engine) for feature in features().values())), None)


def expected(run: Any, *, on_gpu: bool) -> Expected | None:
    """Return what the first feature that knows the run expects of it."""
    return next(filter(None, (feature.expected(run, on_gpu=on_gpu) for feature in features().values())), None)


def summary(run: Any) -> list[str]:
    return [line for feature in features().values() for line in feature.summary(run)]


def stores(config: Any) -> dict[str, str]:
    return {key: url for feature in asked(config) for key, url in feature.stores(config).items()}


def disks(run: Any) -> dict[str, str]:
    return {key: path for feature in features().values() for key, path in feature.disks(run).items()}


def notes(run: Any) -> list[str]:
    return [line for feature in asked(run.config) for line in feature.notes(run)]


def commands() -> dict[str, tuple[str, str]]:
    """Name -> (module, what it does)."""
    return {name: (module, what) for feature in features().values() for name, module, what in feature.commands}


def answers() -> Iterator[tuple[str, str, str]]:
    for feature in features().values():
        yield from feature.answers()


def agent() -> str:
    """The module of the process beside the ranks of each host; empty: there is none."""
    return next((feature.agent for feature in features().values() if feature.agent), "")


def subcommands(command: str, add: Callable[..., Any]) -> None:
    for feature in features().values():
        feature.subcommands(command, add)


def options(command: str, add: Callable[..., Any]) -> None:
    for feature in features().values():
        feature.options(command, add)


def before_command(command: str, args: Any) -> list[Callable[[Any], None]]:
    """Return what is to be called with the command's result. Raises UserError."""
    after = [feature.before_command(command, args) for feature in features().values()]
    return [step for step in after if step is not None]


def passes_on(command: str) -> bool:
    """True for a command of a feature that passes variables of its process on to other hosts."""
    return any(feature.passes_on for feature in features().values() for name, *_ in feature.commands if name == command)


def before_launch(run: Any, words: Sequence[str], hosts: Sequence[Any], port: int) -> str | None:
    """Ask each feature, as its method says. Raises ConfigError."""
    addresses = [feature.before_launch(run, words, hosts, port) for feature in features().values()]
    return next(filter(None, addresses), None)


def keeps(checkpoints: Path) -> list[Path]:
    return [folder for feature in features().values() for folder in feature.keeps(checkpoints)]


def renamed() -> dict[str, str]:
    return dict(pair for feature in features().values() for pair in feature.renamed)


def rules(config: Any) -> Rules:
    """Return the rules of all features that a run has, or whose section it changes."""
    concerned = (feature for feature in features().values() if _changed(feature, config) or feature.asked(config))
    return sum((feature.rules() for feature in concerned), Rules())


def _changed(feature: Feature, config: Any) -> bool:
    return feature.section is not None and getattr(config, feature.key) != defaults()[feature.key]


def with_sections(cls: type[Any]) -> type[Any]:
    """Add a field to the class of a run for each feature with a section, before it becomes a dataclass."""
    for feature in features().values():
        if feature.section is not None:
            cls.__annotations__[feature.key] = feature.section
            setattr(cls, feature.key, field(default_factory=feature.default or feature.section))
    return cls
