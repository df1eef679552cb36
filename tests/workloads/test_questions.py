import json

import pytest
import torch

from assay.errors import InputError
from assay.workloads.language import random_model
from assay.workloads.questions import choose, read_questions, step_by_step


def tokenizer(text, add_special_tokens):
    assert add_special_tokens is False
    return {"input_ids": [ord(c) for c in text if c != "~"]}


def write(tmp_path, *lines):
    file = tmp_path / "q.jsonl"
    file.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
    return str(file)


def test_questions_as_tokens(tmp_path):
    path = write(
        tmp_path,
        {"context": "ab", "choices": [" c", "d"], "answer": 1},
        "",
        {"context": "x", "choices": ["y", "z"], "answer": 0},
    )
    first, second = read_questions(path, tokenizer)
    assert first.context == (97, 98) and first.choices == ((32, 99), (100,)) and first.answer == 1
    assert second.answer == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ([1], "is no JSON object"),
        ({"choices": ["a", "b"], "answer": 0}, "no text in the field 'context'"),
        ({"context": " ", "choices": ["a", "b"], "answer": 0}, "no text in the field 'context'"),
        ({"context": "c", "choices": ["a"], "answer": 0}, "two or more texts in the field 'choices'"),
        ({"context": "c", "choices": "ab", "answer": 0}, "two or more texts"),
        ({"context": "c", "choices": ["a", ""], "answer": 0}, "two or more texts"),
        ({"context": "c", "choices": ["a", "b"], "answer": 2}, "a number from 0 to 1 in the field 'answer'"),
        ({"context": "c", "choices": ["a", "b"], "answer": True}, "a number from 0 to 1"),
        ({"context": "c", "choices": ["a", "~"], "answer": 0}, "a choice has no tokens"),
        ("", "holds no questions"),
    ],
)
def test_files_that_are_no_questions(tmp_path, line, message):
    with pytest.raises(InputError, match=message):
        read_questions(write(tmp_path, line), tokenizer)


def test_other_files(tmp_path):
    with pytest.raises(InputError, match="is no file"):
        read_questions(str(tmp_path / "absent"), tokenizer)
    (tmp_path / "q.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8 text"):
        read_questions(str(tmp_path / "q.jsonl"), tokenizer)


@pytest.mark.parametrize("at_once", [3, 8, 20])
def test_likelihoods_of_choices(at_once):
    """Against one forward per choice, without a cache."""
    from transformers import DynamicCache

    model = random_model()
    model.set_attn_implementation("sdpa")
    ids = torch.randint(256, (1, 8), generator=torch.Generator().manual_seed(0))
    choices = [torch.tensor([x]) for x in ([5], [7, 9, 11], [1, 2])]
    expected = []
    for choice in choices:
        whole = torch.cat([ids, choice], 1)
        with torch.no_grad():
            log = model(whole).logits.log_softmax(-1)
        expected.append(torch.stack([log[0, t - 1, whole[0, t]] for t in range(8, whole.shape[1])]).mean())
    found = choose(model, DynamicCache(config=model.config), ids, choices, at_once)
    torch.testing.assert_close(found, torch.stack(expected).log_softmax(0), rtol=0, atol=1e-4)


def test_step_by_step_equals_one_forward():
    from transformers import DynamicCache

    model = random_model()
    model.set_attn_implementation("sdpa")
    ids = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids).logits
    out = step_by_step(model, DynamicCache(config=model.config), ids)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-4)
