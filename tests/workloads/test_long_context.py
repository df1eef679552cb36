import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from assay.errors import InputError
from assay.workloads import long_context
from assay.workloads.long_context import DEPTHS, HEAD, QUESTION, LongContext, long_text, passkey, passkeys


class Letters:
    """A tokenizer with one token a character."""

    def __call__(self, text, add_special_tokens=False):
        many = [text] if isinstance(text, str) else text
        ids = [[ord(c) % 128 for c in t] for t in many]
        return {"input_ids": ids[0] if isinstance(text, str) else ids}


def text_of(tokens):
    return "".join(map(chr, tokens))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        vocab_size=128,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {chr(i): i for i in (10, *range(32, 127))} | {"[UNK]": 0}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("depth", [0, 0.3, 1])
@pytest.mark.parametrize("length", [250, 800, 1777])
def test_passkey(length, depth):
    asked = passkey(Letters(), length, depth, "31415")
    assert len(asked.context) == length
    context = text_of(asked.context)
    needle = " The pass key is 31415. Remember it. 31415 is the pass key. "
    assert context.startswith(HEAD) and context.count(needle) == 1 and context.count("31415") == 2
    at = context.index(needle) - len(HEAD)
    assert at == int(depth * (length - len(HEAD) - len(needle)))
    rest = context.replace(needle, "").removeprefix(HEAD)
    assert rest == (long_context.FILLER * 30)[: len(rest)]
    assert text_of(asked.question) == QUESTION and text_of(asked.answer) == "31415"


def test_passkeys_are_drawn_in_order():
    from random import Random

    draw = Random(0)
    first = "".join(draw.choice("0123456789") for _ in range(5))
    asked = passkeys(Letters(), 300, 8)
    assert text_of(asked[0].answer) == first
    assert len({q.answer for q in asked}) == 8
    assert asked[6].context.index(ord("R")) == asked[0].context.index(ord("R"))  # depths come in turn
    assert passkeys(Letters(), 300, 3) == asked[:3]
    assert passkeys(Letters(), 300, 3, seed=1) != asked[:3]
    assert len(DEPTHS) == 6


def test_bad_passkeys():
    with pytest.raises(ValueError, match="depth must lie in"):
        passkey(Letters(), 500, 1.5, "1")
    with pytest.raises(ValueError, match="length must be at least 148 tokens, not 100"):
        passkey(Letters(), 100, 0.5, "1")


def test_the_long_text_is_long():
    text = long_text()
    assert len(text) > 4 * 16_000  # at some four letters a token
    assert "\n\n" in text


def test_random_model():
    workload = LongContext(model="random", prompt=40, continuation=4, haystack=64)
    task = workload.build(device="cpu", seed=0)
    assert task.settings == ("retrieval", "text") and task.limit == 256
    one, again = task.prepare("retrieval", 3), task.prepare("retrieval", 3)
    assert torch.equal(one.layers[0][0], again.layers[0][0]) and one.layers[0][0].shape[2] == 64
    assert one.question.shape == (1, 4) and one.answer.shape == (3,)
    assert not torch.equal(one.question, task.prepare("retrieval", 4).question)
    assert task.prepare("text", 0).next.shape == (1, 4)
    digests = {workload.build(device="cpu", seed=s).digest for s in (0, 0, 1)}
    assert len(digests) == 2


def test_embedded_text_with_a_model(model_folder):
    workload = LongContext(model=str(model_folder), prompt=300, continuation=20, haystack=400)
    task = workload.build(device="cpu", seed=0)
    assert task.limit == 256 and "Python's reference as one text" in task.title and "400 tokens" in task.title
    assert task.digest == workload.build(device="cpu", seed=0).digest
    asked = task.prepare("retrieval", 1)
    assert asked.layers[2][0].shape == (1, 2, 400, 16)
    assert asked.answer.shape == (5,) and len(task.documents[0]) == 321


def test_own_text_and_questions(model_folder, tmp_path):
    text, qa = tmp_path / "text.txt", tmp_path / "qa.jsonl"
    text.write_text("abc " * 400)
    rows = [{"context": "The key is red." * 9, "question": " Which?", "answer": "red"}] * 3
    qa.write_text("\n\n".join(json.dumps(r) for r in rows))
    workload = LongContext(model=str(model_folder), text=str(text), qa=str(qa), prompt=100, continuation=10)
    task = workload.build(device="cpu", seed=0)
    assert task.limit == 3 and f"3 questions of {qa}" in task.title
    asked = task.prepare("retrieval", 2)
    assert asked.layers[0][0].shape[2] == 135 and text_of(asked.answer.tolist()) == "red"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("{", "line 1 is not JSON"),
        ('{"context": "a", "question": "b"}', "line 1 has no text in the field 'answer'"),
        ('{"context": "a", "question": "", "answer": "c"}', "line 1 has no text in the field 'question'"),
        ("3", "line 1 has no text in the field 'context'"),
        (b"\xff\xfe", "not UTF-8 text"),
        (json.dumps({"context": "a" * 2000, "question": "b", "answer": "c"}), "needs 2002 positions .* has 1024"),
    ],
)
def test_bad_questions(model_folder, tmp_path, content, message):
    qa = tmp_path / "qa.jsonl"
    qa.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        LongContext(model=str(model_folder), qa=str(qa), prompt=50, continuation=5).build(device="cpu", seed=0)


def test_bad_options(model_folder, tmp_path):
    def build(**options):
        LongContext(**{"prompt": 50, "continuation": 5} | options).build(device="cpu", seed=0)

    with pytest.raises(InputError, match="--haystack must be at least 64 tokens, not 5"):
        build(model="random", haystack=5)
    with pytest.raises(InputError, match="--qa needs a model with a tokenizer"):
        build(model="random", qa="x.jsonl")
    with pytest.raises(InputError, match=r"--qa 'no\.jsonl' is no file"):
        build(model=str(model_folder), qa="no.jsonl")
    with pytest.raises(InputError, match=r"--haystack 1010 needs 1054 positions with its question, .* has 1024"):
        build(model=str(model_folder), haystack=1010)
    with pytest.raises(InputError, match="--prompt 2000 and --continuation 5 are more than the 1024"):
        build(model=str(model_folder), prompt=2000)
    config = json.loads((model_folder / "config.json").read_text())
    roomy = tmp_path / "roomy"
    roomy.mkdir()
    for file in model_folder.iterdir():
        (roomy / file.name).write_bytes(file.read_bytes())
    (roomy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**7}))
    with pytest.raises(InputError, match=r"^Python's reference as one text is too short"):
        build(model=str(roomy), prompt=10**6)
