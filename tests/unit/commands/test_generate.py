"""`llmtrain generate`, as a user calls it: which state it reads, what it prints, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.hf.serving import sampling_defaults
from llmtrain.checkpoint.rundir import RunDirectory
from llmtrain.cli import main
from llmtrain.data.tokenize import train_bpe
from llmtrain.training.run import _sample
from tests.helpers import gpu_texts
from tests.helpers.chat import KINDS, write_tokenizer
from tests.helpers.hf_folders import TOKENS, checkpoint_of, new_model

VOCABULARY = 290


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "tokenizer"
    texts = [f"{word}s and {word}ing, " * 9 for word in ("walk", "talk", "paint", "think", "read")]
    train_bpe(texts, VOCABULARY, folder)
    return folder


def model_that_says(token: int):
    """A Llama whose likeliest next token is always `token`."""
    model = new_model("llama", vocab_size=VOCABULARY)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.lm_head.weight[token] = 1.0
    return model


@pytest.fixture
def run(tmp_path, tokenizer) -> Path:
    """A run that was exported at step 7 and trained on to step 8: its words are "A", then "B"."""
    folder = tmp_path / "run"
    beside = {"tokenizer_dir": str(tokenizer), "separator_id": 0}
    first = checkpoint_of(model_that_says(ord("A") - 32), folder, step=7, **beside)
    export_hf(first, folder / "export", check="none")  # the proof rightly refuses matrices of one value
    checkpoint_of(model_that_says(ord("B") - 32), folder, step=8, **beside)
    return folder


def greedy(capsys, *words: object) -> tuple[str, str]:
    assert main(["generate", *map(str, words), "--max-tokens", "5", "--temperature", "0"]) == 0
    return capsys.readouterr()


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")


def _lacking(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _adapter(folder: Path, weights: str) -> None:
    base = folder.rename(folder.with_name("base"))
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, folder)
    settings = {"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"], "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / weights).write_bytes(b"\x80\x04cos\nsystem\n")


def _with(folder: Path, name: str, **fields: object) -> None:
    (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **fields}))


def _replacing(content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


DEEP = '{"a":' * 100_000


def _renamed(folder: Path) -> None:
    tensors = {f"_orig_mod.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
STRANGE = {
    "names of torch.compile": (_renamed, "The names there contain `_orig_mod.`, which torch.compile adds"),
    "a pointer of git-lfs": (lambda f: (f / "model.safetensors").write_text(LFS), "`git lfs pull` in its folder"),
    "a tokenizer that is a pointer": (lambda f: (f / "tokenizer.json").write_text(LFS), "`git lfs pull` in its folder"),
    "a pickle": (_pickle, "Only safetensors are read"),
    "a tensor is lacking": (_lacking, "lacks 1 of the model's 21 parameters, first model.norm.weight"),
    "a deep config.json": (lambda f: (f / "config.json").write_text(DEEP), "nested deeper than 100"),
    "a deep tokenizer": (lambda f: (f / "tokenizer_config.json").write_text(DEEP), "nested deeper than 100"),
    "a tokenizer.json that is none": (lambda f: (f / "tokenizer.json").write_text("[]"), "finds no tokenizer there"),
    "a width of 10^8": (lambda f: _with(f, "config.json", hidden_size=10**8), "more memory than this host has"),
    "a normalizer of 50^7 letters": (
        lambda f: _with(
            f, "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [_replacing("a" * 50)] * 7}
        ),
        "tokenizer.json: its normalizer turns one character into up to 7.81e+11",
    ),
    "a decoder of 10^6 a letter": (
        lambda f: _with(f, "tokenizer.json", decoder={"type": "Sequence", "decoders": [_replacing("z" * 10**6)]}),
        "its decoder turns one character into up to 1e+06",
    ),
    "a deep adapter": (
        lambda f: (_adapter(f, "adapter_model.safetensors"), (f / "adapter_config.json").write_text(DEEP)),
        "does not name the adapter's base model",
    ),
    "an adapter that is a pickle": (lambda f: _adapter(f, "adapter_model.bin"), "Only safetensors are read"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_a_strangers_folder_ends_in_a_sentence(run, capsys, case):
    """generate opens it by the reader that training has."""
    strange, (change, says) = run / "export", STRANGE[case]
    change(strange)
    assert main(["generate", str(strange), "--prompt", "walk"]) == 2
    told = capsys.readouterr().err
    assert says in told and told.count("error: ") == 1 and "Traceback" not in told, told


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_weights_that_are_no_numbers_end_in_a_sentence(run, capsys, temperature):
    tensors = load_file(run / "export/model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, run / "export/model.safetensors", metadata={"format": "pt"})
    assert main(["generate", str(run / "export"), "--prompt", "walk", "--temperature", temperature]) == 2
    assert "NaN" in capsys.readouterr().err


def test_the_newest_state_of_a_run_is_what_continues_the_prompt(run, capsys):
    """ "Train longer, Ctrl-C" leaves an export that is older than the checkpoints."""
    out, err = greedy(capsys, run, "--prompt", "walk")
    assert out.strip() == "walkBBBBB"
    assert "step-00000008" in err and f"{run / 'export'} is of step 7" in err
    shutil.rmtree(run / "checkpoints" / "step-00000008")
    out, err = greedy(capsys, run, "--prompt", "walk")
    assert out.strip() == "walkAAAAA" and f"model: {run / 'export'}, of step 7" in err
    out, _ = greedy(capsys, run / "export", "--prompt", "walk")
    assert out.strip() == "walkAAAAA"


def test_a_run_without_an_export_and_one_of_its_checkpoints(run, capsys):
    shutil.rmtree(run / "export")
    assert greedy(capsys, run, "--prompt", "walk")[0].strip() == "walkBBBBB"
    assert greedy(capsys, run / "step-7", "--prompt", "walk")[0].strip() == "walkAAAAA"


def test_the_best_state_of_a_run(run, tokenizer, capsys):
    about = {"tokenizer_dir": str(tokenizer), "separator_id": 0}
    about["run"] = {"checkpoint": {"keep_best": {"metric": "eval/loss"}}}
    for step, word, loss in ((9, "C", 2.0), (10, "D", 3.0)):
        figures = {"step": step, "figures": {"eval/loss": loss}}
        checkpoint_of(model_that_says(ord(word) - 32), run, step=step, evaluation=figures, **about)
    assert greedy(capsys, run, "--prompt", "walk")[0].strip() == "walkDDDDD"
    for place in (run, run.as_uri()):
        out, err = greedy(capsys, place, "--best", "--prompt", "walk")
        assert out.strip() == "walkCCCCC" and "step-00000009" in err
    assert main(["generate", str(run / "export"), "--best"]) == 2
    assert str(run / "export") in (error := capsys.readouterr().err) and "keep_best" in error


@pytest.mark.parametrize("command", [("generate",), ("checkpoint", "from-hf")])
@pytest.mark.parametrize("path", ["runs/nope", "mine/nope"])
def test_a_path_that_does_not_exist_asks_no_hub(path, command, tmp_path, capsys, monkeypatch):
    """The Hub was asked for `runs/nope`, for half a minute where there is no network."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: pytest.fail("the network was asked"))
    assert main([*command, path, *(["out"] if "from-hf" in command else [])]) == 2
    err = capsys.readouterr().err
    told = "has no config.json" if "from-hf" in command else "no such folder"
    assert path in err and told in err and "Hub" not in err


def test_an_export_names_the_special_tokens_of_its_tokenizer(run, tokenizer, tmp_path):
    """Llama's own defaults, begin 1 and end 2, are `!` and a quotation mark of this vocabulary."""
    checkpoint = checkpoint_of(
        new_model("llama", vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=None),
        tmp_path / "other",
        tokenizer_dir=str(tokenizer),
        separator_id=0,
    )
    export_hf(checkpoint, tmp_path / "out")
    config, words = AutoConfig.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    settings = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id) == (words.bos_token_id, words.eos_token_id) == (0, 0)
    assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (0, 0, words.pad_token_id)
    assert config.pad_token_id is None, "transformers would never train the end token's row again"


def test_several_end_tokens_and_the_padding_of_a_chat_model_stay(tokenizer, tmp_path):
    model = new_model("llama", vocab_size=VOCABULARY, bos_token_id=5, eos_token_id=[4, 0], pad_token_id=9)
    checkpoint = checkpoint_of(model, tmp_path / "run", tokenizer_dir=str(tokenizer), separator_id=0)
    export_hf(checkpoint, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, [4, 0], 9)
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [4, 0]


def test_where_a_base_stops_stays_in_the_export(tokenizer, tmp_path):
    """Llama 3.1 names three ends in generation_config.json alone, of which one ends a turn and one a call of a tool."""
    base, data = (write_tokenizer(tmp_path / name, KINDS["llama3"]) for name in ("base", "data"))
    (data / "generation_config.json").unlink()
    words = AutoTokenizer.from_pretrained(base)
    size, (end, turn, begin) = len(words), words.convert_tokens_to_ids(["<|end|>", "<|eot_id|>", "<bos>"])
    model = new_model("llama", vocab_size=size + 40, bos_token_id=1, eos_token_id=2, pad_token_id=None)
    run = {"run": {"model": {"pretrained": str(base), "revision": None}}, "separator_id": end}
    for case, beside, ends in (
        ("own", {**run, "tokenizer_dir": str(data)}, [turn, begin, end]),
        ("foreign", {**run, "tokenizer_dir": str(tokenizer), "separator_id": 0}, 0),
        ("one", {**run, "tokenizer_dir": str(data)}, end),
    ):
        named = [2, turn, begin] if ends != end else end  # 2 is a word, the default of Llama's configuration
        (base / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        record = sampling_defaults(base, Path(beside["tokenizer_dir"]))  # as a run keeps it
        checkpoint = checkpoint_of(model, tmp_path / case, **beside, sampling=record)
        assert main(["checkpoint", "to-hf", str(checkpoint), str(tmp_path / f"{case}-out")]) == 0
        told = json.loads((tmp_path / f"{case}-out/generation_config.json").read_text())
        assert told["eos_token_id"] == ends, case
        assert json.loads((tmp_path / f"{case}-out/config.json").read_text())["eos_token_id"] in (end, 0)


def test_a_tokenizer_that_is_gone_is_reported(tmp_path, capsys):
    checkpoint = checkpoint_of(new_model("llama"), tmp_path / "run")
    assert main(["checkpoint", "to-hf", str(checkpoint), str(tmp_path / "out")]) == 0
    assert "/nonexistent" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == TOKENS["eos_token_id"]
    assert main(["generate", str(tmp_path / "out"), "--prompt", "walk"]) == 2
    assert str(tmp_path / "out") in (error := capsys.readouterr().err) and "no tokenizer" in error


def test_text_appears_as_it_is_generated(tmp_path, tokenizer, capsys, monkeypatch):
    """While the model still computes: words that have ended or, from transformers 5.24 on, letters as well."""
    from tokenizers import Tokenizer

    space = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(" ").ids[0]
    checkpoint_of(model_that_says(space), tmp_path / "run", tokenizer_dir=str(tokenizer), separator_id=0)
    seen = []
    forward = LlamaForCausalLM.forward

    def watched(self, *args, **kwargs):
        seen.append(capsys.readouterr().out)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", watched)
    words = ["--prompt", "walks and talks", "--max-tokens", "6", "--temperature", "0"]
    assert main(["generate", str(tmp_path / "run"), *words]) == 0
    assert seen[:4] in (["walks and ", "talks ", " ", " "], ["walks and talks", " ", " ", " "])


def test_without_a_prompt_the_first_token_is_not_put_before_itself(tmp_path, tokenizer, monkeypatch):
    """Of a tokenizer that puts it before each text, as Llama's."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    shutil.copytree(tokenizer, tmp_path / "tokenizer")
    begins = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    begins.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    begins.save(str(tmp_path / "tokenizer/tokenizer.json"))
    beside = {"tokenizer_dir": str(tmp_path / "tokenizer"), "separator_id": 0}
    checkpoint_of(model_that_says(40), tmp_path / "run", **beside)
    seen, forward = [], LlamaForCausalLM.forward
    monkeypatch.setattr(
        LlamaForCausalLM,
        "forward",
        lambda self, *a, **more: (seen.append(more["input_ids"].tolist()), forward(self, *a, **more))[1],
    )
    for words in ([], ["--prompt", "A"]):
        assert main(["generate", str(tmp_path / "run"), "--max-tokens", "1", *words]) == 0
    assert seen == [[[0]], [[0, ord("A") - 32]]]


def test_top_k_and_top_p_bound_what_is_sampled(run, capsys):
    """At a temperature at which all 290 tokens are about as likely, either of them leaves the likeliest one."""
    hot = ["--prompt", "walk", "--temperature", "1000", "--max-tokens", "8"]
    for words, same in (([], False), (["--top-k", "1"], True), (["--top-k", "0", "--top-p", "0.000001"], True)):
        assert main(["generate", str(run), *hot, *words]) == 0
        assert (capsys.readouterr().out.strip() == "walkBBBBBBBB") is same, words


def test_a_tokenizer_whose_expression_never_ends_is_an_error(run, capsys):
    """The library in Rust panics, which is no Exception in Python."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    _with(run / "export", "tokenizer.json", pre_tokenizer=split)
    assert main(["generate", str(run / "export"), "--prompt", "a" * 40 + "!"]) == 2
    err = capsys.readouterr().err
    assert "error: a tokenizer" in err and "Traceback" not in err, err


def test_what_a_decoder_makes_controls_no_terminal(run, capsys):
    title = {"type": "Replace", "pattern": {"String": "B"}, "content": "\x1b]0;x\x07"}
    _with(run / "export", "tokenizer.json", decoder={"type": "Sequence", "decoders": [title]})
    out, _ = greedy(capsys, run / "export", "--prompt", "B")
    assert "\\x1b]0;x\\x07" in out and "\x1b" not in out


def test_no_more_tokens_than_the_model_has_positions_for(run, tmp_path, tokenizer, capsys):
    model = new_model("gpt2", vocab_size=VOCABULARY, n_positions=16)
    checkpoint_of(model, tmp_path / "gpt2", tokenizer_dir=str(tokenizer), separator_id=0)
    assert main(["generate", str(tmp_path / "gpt2"), "--prompt", "walk", "--max-tokens", "99"]) == 0
    assert "15 tokens" in (note := capsys.readouterr().err) and " 16" in note
    assert main(["generate", str(tmp_path / "gpt2"), "--prompt", "x" * 40]) == 2
    assert " 16" in (error := capsys.readouterr().err) and "prompt" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "-1"], "-1: must be at least 0"),
        (["--top-p", "1.5"], "1.5: must be above 0 and at most 1"),
        (["--top-p", "0"], "0: must be above 0"),
        (["--top-k", "-3"], "-3: must be at least 0"),
        (["--max-tokens", "0"], "0: must be at least 1"),
        (["--max-tokens", "many"], "'many'"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_loaded(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["generate", str(tmp_path / "nowhere"), *words])
    assert end.value.code == 2 and message in capsys.readouterr().err


class Told:
    """The events of a tracker."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, kind: str, **_: object) -> None:
        self.events.append(kind)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError(gpu_texts.OUT_OF_MEMORY), RuntimeError(gpu_texts.CUBLAS_ALLOC)], ids=type
)
def test_a_run_ends_well_where_its_sample_finds_no_memory(run, error, monkeypatch, capsys):
    """The exported model is on the GPU next to the engine: an 8B model has no room there."""

    def generate(*_: object, **__: object) -> str:
        raise error

    tracker, folder = Told(), RunDirectory(str(run), None)
    monkeypatch.setattr("llmtrain.checkpoint.hf.inference.generate", generate)
    _sample(folder, "walk", 0, tracker, torch.device("cuda", 0))
    assert tracker.events == []
    said = capsys.readouterr().err
    assert "cuda:0" in said and f"llmtrain generate {run}" in said
    monkeypatch.setattr(error, "args", ("CUDA error: device-side assert triggered",))
    with pytest.raises(RuntimeError, match="device-side assert"):
        _sample(folder, "walk", 0, tracker, torch.device("cuda", 0))
