"""RULER: structure, lengths, seeds and answers of generated examples; official files when they are at hand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from small_tokenizers import byte_tokenizer, merging_tokenizer

from qevict_bench.task import Example, Prompter
from tasks.ruler import Ruler, draws, prose
from tasks.ruler.own import OwnWording
from tasks.ruler.structure import NIAH, SUBSETS

_ROOT = Path(__file__).parents[1]
_OFFICIAL = _ROOT.parent / "shared" / "data" / "ruler" / "llama31_4096"
_BYTES = Prompter(byte_tokenizer(), chat=True)
_MERGES = Prompter(merging_tokenizer(chat=False), chat=False)

_NUMBER = r"\b[1-9]\d{6}\b"
_UUID = r"\b[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\b"
# subset: haystack, pattern of keys, pattern of values, keys, values, queries (None: as many as lines)
_TABLE: dict[str, tuple[str, str, str, int | None, int, int]] = {
    "niah_single_1": ("noise", r"[a-z]+-[a-z]+", _NUMBER, 1, 1, 1),
    "niah_single_2": ("essay", r"[a-z]+-[a-z]+", _NUMBER, 1, 1, 1),
    "niah_single_3": ("essay", r"[a-z]+-[a-z]+", _UUID, 1, 1, 1),
    "niah_multikey_1": ("essay", r"[a-z]+-[a-z]+", _NUMBER, 4, 1, 1),
    "niah_multikey_2": ("needles", r"[a-z]+-[a-z]+", _NUMBER, None, 1, 1),
    "niah_multikey_3": ("needles", _UUID, _UUID, None, 1, 1),
    "niah_multivalue": ("essay", r"[a-z]+-[a-z]+", _NUMBER, 1, 4, 1),
    "niah_multiquery": ("essay", r"[a-z]+-[a-z]+", _NUMBER, 4, 1, 4),
}


def _examples(
    subset: str, limit: int = 2, length: int = 4096, prompter: Prompter = _BYTES, seed: int = 0, split: str = "test"
) -> list[Example]:
    task = Ruler(context_length=length, subsets=(subset,))
    return list(task.examples(prompter, limit, seed, split))


def _needles(subset: str, text: str) -> list[tuple[str, str]]:
    _, key, value, *_ = _TABLE[subset]
    return re.findall(rf"The (?:code|serial) of ({key}): ({value})\.", text)


@pytest.mark.parametrize("subset", NIAH)
def test_structure(subset: str) -> None:
    haystack, key_pattern, value_pattern, num_keys, num_values, num_queries = _TABLE[subset]
    for example in _examples(subset, limit=3):
        needles = _needles(subset, example.context)
        keys = {key for key, _ in needles}
        values = [value for _, value in needles]
        lines = example.context.strip().split("\n")[2:]
        assert len(set(values)) == len(values)
        assert len(values) == len(keys) * num_values
        assert len(keys) == (len(lines) if num_keys is None else num_keys)
        assert re.findall(value_pattern, example.context) == values or key_pattern == value_pattern
        asked = re.findall(rf"(?<![\w-])(?:{key_pattern})(?![\w-])", example.question)
        assert len(asked) == num_queries
        assert list(example.answers) == [v for a in asked for v in [v for k, v in needles if k == a]] or num_values > 1
        assert sorted(example.answers) == sorted(value for key, value in needles if key in asked)
        assert asked[0] in example.answer_prefix
        if haystack == "noise":
            assert lines.count(OwnWording.noise_line) == len(lines) - 1
        elif haystack == "essay":
            assert len(lines) == 1


@pytest.mark.parametrize("subset", NIAH)
def test_answers_lie_where_the_spans_say_and_nowhere_else(subset: str) -> None:
    for prompter in (_BYTES, _MERGES):
        for example in _examples(subset, prompter=prompter):
            at_spans = [example.context[start:stop] for start, stop in example.answer_spans]
            assert sorted(at_spans) == sorted(example.answers)
            outside = example.question + example.answer_prefix
            for answer in example.answers:
                assert example.context.count(answer) == 1
                assert answer not in outside
            prompt = prompter.encode(example)
            decoded = prompter.tokenizer.decode([prompt.ids[position] for position in prompt.answer_positions])
            assert all(answer in decoded for answer in example.answers)
            assert len(decoded) <= sum(len(answer) + 2 for answer in example.answers)
            assert max(prompt.answer_positions) < prompt.context_tokens


@pytest.mark.parametrize("prompter", [_BYTES, _MERGES], ids=["bytes_chat", "merges_plain"])
@pytest.mark.parametrize(("length", "subsets"), [(1536, NIAH), (3000, SUBSETS), (5000, NIAH), (9000, SUBSETS)])
def test_prompt_and_answer_fill_the_length(prompter: Prompter, length: int, subsets: Iterable[str]) -> None:
    for example in Ruler(context_length=length, subsets=tuple(subsets)).examples(prompter, 2, seed=1, split="test"):
        total = len(prompter.encode(example).ids) + example.max_new_tokens
        assert 0.9 * length <= total <= length


def test_longest_length() -> None:
    (example,) = _examples("niah_multikey_1", limit=1, length=131_072, prompter=_MERGES)
    total = len(_MERGES.encode(example).ids) + example.max_new_tokens
    assert 0.9 * 131_072 <= total <= 131_072


@pytest.mark.parametrize("subset", NIAH)
def test_every_answer_fits_into_max_new_tokens(subset: str) -> None:
    for example in _examples(subset):
        if len(example.answers) == 1 or "multivalue" in subset:
            reply = " " + ", ".join(example.answers) + "."
            assert len(_BYTES.tokenizer(reply)["input_ids"]) <= example.max_new_tokens


def test_needles_spread_over_all_depths() -> None:
    depths = []
    for example in _examples("niah_single_2", limit=60, length=2048, prompter=_MERGES):
        depths.append(example.answer_spans[0][0] / len(example.context))
    assert min(depths) < 0.15
    assert max(depths) > 0.9
    assert 0.4 < sum(depths) / len(depths) < 0.65


def test_draws_are_reproducible_and_free_of_the_limit() -> None:
    task = Ruler(context_length=2048, subsets=("niah_multiquery", "niah_multikey_2"))
    few, many = (list(task.examples(_MERGES, limit, seed=3, split="test")) for limit in (2, 4))
    assert few == many[:2] + many[4:6]
    assert [example.id for example in few] == [
        "niah_multiquery-0000",
        "niah_multiquery-0001",
        "niah_multikey_2-0000",
        "niah_multikey_2-0001",
    ]
    assert list(task.examples(_MERGES, 2, seed=3, split="test")) == few
    assert len({example.context for example in many}) == len(many)


def test_subset_does_not_depend_on_its_neighbours() -> None:
    alone = _examples("niah_single_2", length=2048)
    among = list(Ruler(context_length=2048).examples(_BYTES, 2, 0, "test"))
    assert alone == [example for example in among if example.subset == "niah_single_2"]


def test_seed_and_split_change_keys_and_values() -> None:
    draws_of = [
        _examples("niah_multikey_2", length=2048, prompter=_MERGES, seed=seed, split=split)
        for seed, split in [(0, "test"), (1, "test"), (0, "dev")]
    ]
    needles = [{n for e in examples for n in _needles("niah_multikey_2", e.context)} for examples in draws_of]
    assert all(len(found) > 20 for found in needles)
    assert not needles[0] & needles[1]
    assert not needles[0] & needles[2]


def test_word_keys_of_dev_and_test_never_coincide() -> None:
    def nouns(split: str) -> set[str]:
        return {key.split("-")[1] for key in islice(draws.keys("words", split, Random(0)), 5000)}

    assert len(nouns("test")) > 1000
    assert not nouns("dev") & nouns("test")


def test_keys_are_distinct_words() -> None:
    keys = list(islice(draws.keys("words", "test", Random(1)), 20_000))
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(r"[a-z]+-[a-z]+", key) for key in keys)


def test_prose_is_varied_and_without_digits() -> None:
    sentences = list(islice(prose.sentences(Random(5)), 5000))
    assert len(set(sentences)) > 0.9 * len(sentences)
    assert not re.search(r"[\d{}]|  ", " ".join(sentences))
    assert all(sentence[0].isupper() or sentence[0] == '"' for sentence in sentences)
    assert sentences == list(islice(prose.sentences(Random(5)), 5000))


@pytest.mark.parametrize("subset", ["niah_single_2", "niah_multikey_3"])
def test_too_short_a_length_names_one_that_fits(subset: str) -> None:
    with pytest.raises(ValueError, match=f"{subset} does not fit context_length=512 ") as caught:
        _examples(subset, length=512)
    least = int(re.search(r"use context_length=(\d+) or more", str(caught.value)).group(1))  # type: ignore[union-attr]
    assert len(_examples(subset, limit=20, length=least)) == 20


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"subsets": ("niah_single_9",)}, "niah_single_9 is not valid; choose from niah_single_1, .*niah_multiquery"),
        ({"subsets": ()}, "empty"),
        ({"subsets": "niah_single_1"}, r"\[niah_single_1\]"),
        ({"subsets": ("niah_single_1", "niah_single_1")}, "twice"),
        ({"context_length": 511}, "context_length=511.*512 to 131072"),
        ({"context_length": 131_073}, "context_length=131073.*512 to 131072"),
        ({"source": "disk"}, "source='disk' is unknown; use one of generate, local, ruler_repo, hub"),
        ({"source": "local"}, "data_dir is empty.*task.data_dir"),
        ({"source": "hub"}, "hub_id is empty.*task.hub_id"),
        ({"source": "ruler_repo"}, "ruler_dir is empty.*task.ruler_dir"),
        ({"hub_id": "x/y"}, "hub_id='x/y' is not used with source=generate; set task.source=hub"),
        ({"source": "hub", "hub_id": "x/y", "qa_data_dir": "q"}, "qa_data_dir='q' is not used with source=hub"),
        ({"data_dir": "x"}, "data_dir='x' is not used"),
    ],
)
def test_mistaken_fields_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ruler(**changed)


@pytest.mark.parametrize(
    ("limit", "split", "message"),
    [(0, "test", "limit=0"), (1, "train", "split='train' is not to be had from source=generate; use test or dev")],
)
def test_mistaken_requests_are_refused(limit: int, split: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(Ruler().examples(_BYTES, limit, 0, split))


def test_yaml_takes_the_length_of_the_profile() -> None:
    config = OmegaConf.load(_ROOT / "configs" / "task" / "ruler.yaml")
    assert isinstance(config, DictConfig)
    root = OmegaConf.create({"profile": {"context_length": 2048}, "task": config})
    assert instantiate(root.task) == Ruler(context_length=2048)
    changed = instantiate(root.task, subsets=["niah_multivalue"])
    assert changed.subsets == ("niah_multivalue",)
    assert hash(changed) == hash(Ruler(context_length=2048, subsets=("niah_multivalue",)))


def test_fingerprint_follows_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Ruler(subsets=("niah_single_1",))
    before = task.fingerprint()
    assert before == Ruler(subsets=("niah_single_1",)).fingerprint()
    monkeypatch.setattr("tasks.ruler.own.OwnWording.noise_line", "Something else.")
    assert task.fingerprint() != before
    _write(tmp_path, "vt", [_row()])
    local = Ruler(subsets=("vt",), source="local", data_dir=str(tmp_path))
    before = local.fingerprint()
    _write(tmp_path, "vt", [_row(), _row()])
    assert local.fingerprint() != before


def test_score() -> None:
    (example,) = _examples("niah_multivalue", limit=1, length=2048)
    task = Ruler()
    assert task.score(f" {example.answers[0]}, {example.answers[2]}.", example) == 0.5
    assert task.metrics(" ".join(example.answers), example) == {"string_match_all": 1.0}
    assert (task.name, task.prompt_source, task.stop) == ("ruler", "own", ("\n",))


def _row(**changed: Any) -> dict[str, Any]:
    row = {"index": 7, "input": "Task.\nA needle: 41.\nWhat?", "outputs": ["41"], "answer_prefix": " It is"}
    return {key: value for key, value in (row | changed).items() if value is not ...}


def _write(folder: Path, subset: str, rows: list[Any]) -> Path:
    path = folder / f"{subset}.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def _read(folder: Path, subset: str, limit: int = 9) -> Iterator[Example]:
    return Ruler(subsets=(subset,), source="local", data_dir=str(folder)).examples(_BYTES, limit, 0, "test")


def test_local_rows(tmp_path: Path) -> None:
    _write(tmp_path, "niah_single_1", [_row(), _row(index=7, outputs=["41", "needle"])])
    first, second = _read(tmp_path, "niah_single_1")
    assert first == Example(
        "niah_single_1-0000",
        "niah_single_1",
        "Task.\nA needle: 41.\n",
        "What?",
        " It is",
        ("41",),
        128,
        ((16, 18),),
        data_source="official",
        instruction_chars=-1,
    )
    assert (second.id, second.answer_spans) == ("niah_single_1-0001", ((8, 14), (16, 18)))
    assert list(_read(tmp_path, "niah_single_1", limit=1)) == [first]
    task = Ruler(source="local", data_dir=str(tmp_path))
    assert (task.prompt_source, task.stop) == ("official", ())


def test_local_folder_per_subset_and_qa_question(tmp_path: Path) -> None:
    (tmp_path / "qa_1").mkdir()
    row = _row(input="Answer it.\n\nDocument 1:\nText.\n\nAnswer it.\n\nQuestion: Who?", outputs=["a", "b"])
    _write(tmp_path / "qa_1", "validation", [row])
    (example,) = _read(tmp_path, "qa_1")
    assert example.question == "Answer it.\n\nQuestion: Who?"
    assert example.context + example.question == row["input"]
    assert Ruler().metrics("only B", example) == {"string_match_part": 1.0}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "line 2: not a JSON object.*prepare.py"),
        ("[1]", "line 2: no column input, outputs, answer_prefix"),
        (_row(answer_prefix=...), "line 2: no column answer_prefix; .*write the data anew"),
        (_row(outputs=[]), r"line 2: outputs is \[\]"),
        (_row(outputs=["a", " "]), r"line 2: outputs is .* a blank answer"),
        (_row(outputs=["\ud83d"]), "line 2: outputs holds half a character"),
        (_row(outputs="41"), "line 2: outputs is '41'"),
        (_row(input=3), "line 2: input is 3; it must be text"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, bad: Any, message: str) -> None:
    _write(tmp_path, "vt", [_row(), bad])
    with pytest.raises(ValueError, match=f"vt.jsonl, {message}"):
        list(_read(tmp_path, "vt"))


def test_missing_file_and_dev_split_of_local_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data of cwe.*task.data_dir"):
        list(_read(tmp_path, "cwe"))
    with pytest.raises(ValueError, match="no data of cwe"):
        Ruler(subsets=("cwe",), source="local", data_dir=str(tmp_path)).fingerprint()
    with pytest.raises(ValueError, match="split='dev' is not to be had from source=local; use test"):
        next(Ruler(source="local", data_dir=str(tmp_path)).examples(_BYTES, 1, 0, "dev"))


@pytest.mark.skipif(not _OFFICIAL.is_dir(), reason="official RULER samples are not at hand")
@pytest.mark.parametrize("subset", sorted(path.stem for path in _OFFICIAL.glob("*.jsonl")))
def test_official_samples(subset: str) -> None:
    rows = [json.loads(line) for line in (_OFFICIAL / f"{subset}.jsonl").read_text().splitlines()]
    task = Ruler(subsets=(subset,), source="local", data_dir=str(_OFFICIAL))
    examples = list(task.examples(_BYTES, 500, 0, "test"))
    assert len(examples) == len(rows) == 3
    new_tokens = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}.get(subset, 128)
    for example, row in zip(examples, rows, strict=True):
        assert example.context + example.question == row["input"]
        assert example.question.rstrip().endswith(("?", "above."))
        assert len(example.question) < 400
        assert example.max_new_tokens == new_tokens
        assert task.score(", ".join(row["outputs"]), example) == 1.0
        assert task.score("", example) == 0.0
        if subset.startswith("niah"):
            found = {example.context[start:stop] for start, stop in example.answer_spans}
            assert found == set(row["outputs"])
