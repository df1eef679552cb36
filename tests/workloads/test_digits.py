"""Digit tasks and pairs of texts: what is given, what is wanted, and what is refused."""

import json

import numpy as np
import pytest

from assay.errors import InputError
from assay.workloads.digits import RULES, DigitTasks
from assay.workloads.source_target import encode_pairs, read_pairs


def test_each_task_is_what_it_says():
    tasks = DigitTasks(("copy", "reverse", "sort", "addmod"), 5)
    ids, labels, task = tasks.sample(400, 0)
    assert ids.shape == labels.shape == (400, 12) and tasks.vocabulary == 15 and tasks.length == 12
    assert (ids[:, 0] == 10 + task).all() and (ids[:, 6] == 14).all() and ids[:, 1:6].max() <= 9
    assert (labels[:, : tasks.prompt] == -100).all() and (labels[:, 7:] == ids[:, 7:]).all()
    for row, number in zip(ids, task):
        x, y = row[1:6].tolist(), row[7:].tolist()
        wanted = {
            "copy": x,
            "reverse": x[::-1],
            "sort": sorted(x),
            "addmod": [sum(x[: j + 1]) % 10 for j in range(5)],
        }[list(RULES)[number]]
        assert y == wanted


def test_digits_and_tasks_are_uniform_and_the_random_state_decides():
    tasks = DigitTasks()
    ids, _, task = tasks.sample(6000, 1)
    assert np.abs(np.bincount(task) / 6000 - 1 / 3).max() < 4 * (2 / 9 / 6000) ** 0.5
    share = np.bincount(ids[:, 1:9].ravel(), minlength=10) / 48000
    assert np.abs(share - 0.1).max() < 4 * (0.09 / 48000) ** 0.5
    assert all(np.array_equal(a, b) for a, b in zip(tasks.sample(5, 3), tasks.sample(5, 3)))
    assert not np.array_equal(tasks.sample(5, 3)[0], tasks.sample(5, 4)[0])


@pytest.mark.parametrize("options", [{"tasks": ()}, {"tasks": ("copy", "copy")}, {"tasks": ("add",)}, {"digits": 0}])
def test_bad_options(options):
    with pytest.raises(ValueError, match="must be"):
        DigitTasks(**options)


class Letters:
    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(c) for c in text]}


def test_pairs_become_rows_of_one_length():
    pairs = [("ab", "c"), ("defg", "hi")]
    causal = encode_pairs(Letters(), pairs, 3, False, 0, 1)
    assert causal[0] == {
        "input_ids": [97, 98, 99, 1, 0, 0],
        "attention_mask": [1, 1, 1, 1, 0, 0],
        "labels": [-100, -100, 99, 1, -100, -100],
    }
    assert causal[1]["input_ids"] == [100, 101, 102, 104, 105, 1], "cut to three tokens"
    seq2seq = encode_pairs(Letters(), pairs, 3, True, 0, None)
    assert seq2seq[0] == {"input_ids": [97, 98, 0], "attention_mask": [1, 1, 0], "labels": [99, -100]}


def test_files_of_pairs(tmp_path):
    good = tmp_path / "good.jsonl"
    good.write_text("\n\n".join(json.dumps({"source": f"s{i}", "target": f"t{i}"}) for i in range(10)))
    assert read_pairs(str(good))[3] == ("s3", "t3")
    for text, message in (
        ("", "holds 0 pairs; at least 10"),
        ("{", "line 1 is not JSON"),
        ('{"source": "a"}', "line 1 has no text in the field 'target'"),
        ('{"source": " ", "target": "b"}', "no text in the field 'source'"),
        ("[1]", "no text in the field 'source'"),
    ):
        bad = tmp_path / "bad.jsonl"
        bad.write_text(text)
        with pytest.raises(InputError, match=message):
            read_pairs(str(bad))
    (tmp_path / "raw.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        read_pairs(str(tmp_path / "raw.jsonl"))
    with pytest.raises(InputError, match="is no file"):
        read_pairs(str(tmp_path / "nowhere.jsonl"))
