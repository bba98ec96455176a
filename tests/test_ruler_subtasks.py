"""RULER's subtasks beyond needles: chains, word counts and questions, and the sizes kept in the cache."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import islice
from math import pi
from pathlib import Path
from random import Random
from typing import Any

import pytest
from small_tokenizers import byte_tokenizer, merging_tokenizer

from qevict_bench.task import Example, Prompter
from tasks.ruler import Ruler, articles, draws, lengths
from tasks.ruler.structure import SUBSETS, repeats

_SHARED = Path(__file__).parents[2] / "shared" / "data"
_MERGES = Prompter(merging_tokenizer(chat=False), chat=False)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QEVICT_BENCH_CACHE", str(tmp_path / "cache"))


def _examples(
    subset: str, limit: int = 2, length: int = 3000, seed: int = 0, split: str = "test", **fields: Any
) -> Any:
    task = Ruler(context_length=length, subsets=(subset,), **fields)
    return list(task.examples(_MERGES, limit, seed, split))


@pytest.mark.parametrize(("length", "shot_lines"), [(3000, 5), (4096, 16)])
def test_vt_has_one_chain_of_five_names_after_a_solved_one(length: int, shot_lines: int) -> None:
    for example in _examples("vt", 4, length):
        shot, text = re.split(r"(?<=[A-Z])\n\n", example.context, maxsplit=1)
        lines = re.findall(r"^Let ([A-Z]+) be ([A-Z]+|\d+)\.$", text, re.MULTILINE)
        assert [name for name, _ in lines] == list(example.answers)
        assert len(set(example.answers)) == 5
        assert all(len(name) == 5 for name in example.answers)
        value = lines[0][1]
        assert 10_000 <= int(value) <= 99_998
        assert [source for _, source in lines[1:]] == list(example.answers[:-1])
        assert value in example.question
        assert "5" in example.question
        assert [example.context[a:b] for a, b in example.answer_spans] == list(example.answers)
        solved = re.findall(r"^Let ([A-Z]+) be", shot, re.MULTILINE)
        assert len(solved) == 5
        assert all(len(name) == 3 for name in solved)
        assert shot.endswith(" ".join(solved))
        assert shot.count("The kettle hums.") == shot_lines


@pytest.mark.parametrize(
    ("length", "common", "uncommon", "shot"), [(3000, 6, 1, (20, 3, 1)), (9000, 30, 3, (40, 10, 3))]
)
def test_cwe_repeats_ten_words_more_often_than_the_rest(
    length: int, common: int, uncommon: int, shot: tuple[int, int, int]
) -> None:
    for example in _examples("cwe", 3, length):
        first, second = _two_lists(example.context)
        counts = Counter(word for _, word in second)
        assert [int(number) for number, _ in second] == list(range(1, len(second) + 1))
        assert {word for word, n in counts.items() if n == common} == set(example.answers)
        assert len(example.answers) == 10
        assert {n for word, n in counts.items() if word not in example.answers} == {uncommon}
        shot_words, often, seldom = shot
        shot_counts = Counter(word for _, word in first)
        assert len(shot_counts) == shot_words
        assert Counter(shot_counts.values()) == {often: 10, seldom: shot_words - 10}
        assert not set(counts) & set(shot_counts)


def _two_lists(context: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The numbered lists of the solved example and of the task."""
    blocks = [re.findall(r"(\d+)\. (\S+)", line) for line in context.split("\n") if line.startswith("1. ")]
    assert len(blocks) == 2
    return blocks[0], blocks[1]


def test_cwe_answers_of_the_solved_example_are_its_ten_most_frequent_words() -> None:
    (example,) = _examples("cwe", 1)
    listed, _ = _two_lists(example.context)
    answer = re.search(r"most repeated words: (.*)\n", example.context)
    assert answer is not None
    best = [word for word, _ in Counter(word for _, word in listed).most_common(10)]
    assert sorted(re.findall(r"\d+\. (\S+)", answer[1])) == sorted(best)


def test_list_words_go_on_after_the_word_lists_end() -> None:
    words = list(islice(draws.list_words("test", Random(0)), 9000))
    assert len(set(words)) == 9000
    assert words[0].isalpha()
    assert "-" in words[-1]
    dev = set(islice(draws.list_words("dev", Random(0)), 3000))
    assert not dev & {word for word in words if "-" not in word}


@pytest.mark.parametrize("length", [1024, 3000, 9000])
def test_fwe_counts_follow_the_zeta_law(length: int) -> None:
    for example in _examples("fwe", 3, length):
        counts = Counter(example.context.split("\n\n")[1].split())
        (dots, top), *rest = counts.most_common(5)
        assert dots == "..."
        assert [word for word, _ in rest[:3]] == list(example.answers)
        assert rest[2][1] > rest[3][1]
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in rest)
        total = top * pi**2 / 6  # words before rounding down, to within 1.65
        for rank, (_, count) in enumerate(rest, start=2):
            assert count == pytest.approx(total * 6 / pi**2 / rank**2, abs=1.1)


def _documents(example: Example) -> list[str]:
    found = re.findall(r"^\[(\d+)\] (.*?)(?=\n\n)", example.context, re.MULTILINE | re.DOTALL)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [text for _, text in found]


def test_qa_1_is_answered_by_one_generated_paragraph() -> None:
    positions = []
    for example in _examples("qa_1", 20):
        documents = _documents(example)
        (answer,) = example.answers
        subject = re.search(
            r"of ([A-Z]\w+)|is ([A-Z]\w+)\?|Who founded ([A-Z]\w+)|was ([A-Z]\w+) founded|are in ([A-Z]\w+)",
            example.question,
        )
        assert subject is not None, example.question
        town = next(name for name in subject.groups() if name)
        (start, stop) = example.answer_spans[0]
        assert example.context[start:stop] == answer
        gold = [i for i, text in enumerate(documents) if town in text and answer in text]
        assert len(gold) >= 1
        assert sum(town in text for text in documents) == 6  # the paragraphs of its own article come along
        positions.append(gold[0] / len(documents))
        assert (example.data_source, example.group) == ("synthetic", "")
    assert min(positions) < 0.25
    assert max(positions) > 0.7


def test_qa_2_needs_two_generated_documents() -> None:
    for example in _examples("qa_2", 20):
        documents = _documents(example)
        workshop = re.search(r"founder of the (.*?) (?:born|go to)", example.question)
        assert workshop is not None
        (about,) = [text for text in documents if text.startswith(workshop[1] + "\n")]
        founder = re.search(r"founded by (.*?) and closed", about)
        assert founder is not None
        (second,) = [text for text in documents if text.startswith(founder[1] + "\n")]
        assert example.answers[0] in second
        assert example.answers[0] not in about
        assert Counter(text.split("\n")[0] for text in documents).most_common(1)[0][1] == 1


@pytest.mark.parametrize("subset", ["qa_1", "qa_2"])
def test_names_of_articles_are_distinct_and_differ_between_splits(subset: str) -> None:
    made = {}
    for split in ("dev", "test"):
        question = articles.question(subset, split, Random(1))
        documents = [*question.support, *islice(question.others, 3000)]
        facts = [document.text.split(".")[0] for document in documents]
        assert len(set(facts)) == len(facts)
        made[split] = set(facts)
    assert not made["dev"] & made["test"]


@pytest.mark.parametrize("subset", SUBSETS)
def test_every_answer_is_in_the_prompt_and_scores_one(subset: str) -> None:
    task = Ruler(context_length=3000, subsets=(subset,))
    for example in task.examples(_MERGES, 3, 7, "test"):
        assert all(answer in example.context for answer in example.answers)
        assert task.score(" ".join(example.answers), example) == 1
        assert task.score("", example) == 0


@pytest.mark.parametrize("subset", ["vt", "cwe", "fwe", "qa_1", "qa_2"])
def test_draws_depend_on_seed_and_split_and_not_on_the_limit(subset: str) -> None:
    first = _examples(subset, 2)
    assert _examples(subset, 3)[:2] == first
    assert first[0] != first[1]
    for changed in ({"seed": 1}, {"split": "dev"}):
        other = _examples(subset, 2, **changed)  # type: ignore[arg-type]
        assert {e.context for e in other}.isdisjoint({e.context for e in first})


@pytest.mark.parametrize("subset", ["vt", "cwe", "fwe", "qa_2"])
def test_a_length_that_is_too_short_is_refused_with_one_that_fits(subset: str) -> None:
    bytes_prompter = Prompter(byte_tokenizer(), chat=True)
    with pytest.raises(ValueError, match=f"{subset} does not fit context_length=512 ") as caught:
        next(Ruler(context_length=512, subsets=(subset,)).examples(bytes_prompter, 1, 0, "test"))
    least = int(re.search(r"use context_length=(\d+) or more", str(caught.value)).group(1))  # type: ignore[union-attr]
    task = Ruler(context_length=least, subsets=(subset,))
    assert len(list(task.examples(bytes_prompter, 5, 0, "test"))) == 5


def test_sizes_are_kept_and_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = _examples("qa_1", 3) + _examples("niah_multikey_1", 3)
    (file,) = (tmp_path / "cache" / "ruler").glob("*.jsonl")
    assert len(file.read_text().splitlines()) == 6
    monkeypatch.setattr(lengths, "fit", lambda *_: pytest.fail("a size was searched for again"))
    assert _examples("qa_1", 3) + _examples("niah_multikey_1", 3) == made


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b'["qa_1-0000", 3',
        b"\xff\xfe\n",
        b'{"a": 1}\n[1]\n["qa_1-0000", 90, "wrong"]\n',
        b'["qa_1-0000", Infinity, "x"]\n["qa_1-0000", 3000000, "x"]\n["qa_1-0000", -1, "x"]\n' + b"[" * 100_000,
    ],
)
def test_damaged_sizes_are_searched_for_again(damage: bytes, tmp_path: Path) -> None:
    made = _examples("qa_1", 2)
    (file,) = (tmp_path / "cache" / "ruler").glob("*.jsonl")
    file.write_bytes(damage)
    assert _examples("qa_1", 2) == made


def test_a_folder_in_place_of_the_sizes_is_no_obstacle(tmp_path: Path) -> None:
    made = _examples("qa_1", 2)
    (file,) = (tmp_path / "cache" / "ruler").glob("*.jsonl")
    file.unlink()
    file.mkdir()
    assert _examples("qa_1", 2) == made


def test_sizes_belong_to_tokenizer_length_seed_and_split(tmp_path: Path) -> None:
    _examples("niah_single_1", 1)
    _examples("niah_single_1", 1, length=2000)
    _examples("niah_single_1", 1, seed=1)
    _examples("niah_single_1", 1, split="dev")
    chat = Prompter(merging_tokenizer(chat=True), chat=True)
    list(Ruler(context_length=3000, subsets=("niah_single_1",)).examples(chat, 1, 0, "test"))
    assert len(list((tmp_path / "cache" / "ruler").glob("*.jsonl"))) == 5


def test_an_unwritable_cache_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QEVICT_BENCH_CACHE", str(tmp_path / "file" / "cache"))
    assert len(_examples("niah_single_1", 2)) == 2


def _squad(folder: Path) -> list[dict[str, Any]]:
    data = [
        {
            "title": f"Town {town}",
            "paragraphs": [
                {
                    "context": f"Town {town} has fact {number}: its colour is c{town}x{number}. It is old. Really.",
                    "qas": [
                        {
                            "question": f"What is colour {number} of town {town}?",
                            "answers": [{"text": f"c{town}x{number}", "answer_start": 9}] * 2,
                            "is_impossible": False,
                        },
                        {"question": "Nothing?", "answers": [], "is_impossible": True},
                        {"question": f"Which town has c{town}x{number}?", "answers": [{"text": f"Town {town}"}]},
                    ],
                }
                for number in range(6)
            ],
        }
        for town in range(40)
    ]
    (folder / "dev-v2.0.json").write_text(json.dumps({"data": data}))
    return data


def test_squad_files(tmp_path: Path) -> None:
    _squad(tmp_path)
    made = _examples("qa_1", 500, 1000, qa_data_dir=str(tmp_path))
    assert len(made) == 240  # half of the 480 answerable questions; the other half is for split=dev
    first, second = made[0], made[1]
    assert first.question.startswith("Question: What is colour 0 of town 0?")
    assert first.answers == ("c0x0", "c0x0")
    assert first.group == second.group == "article-0" != made[20].group
    assert first.data_source == "squad"
    documents = _documents(first)
    assert sum("Town 0 has" in text for text in documents) == 6
    assert len(documents) > 6
    dev = _examples("qa_1", 500, 1000, split="dev", qa_data_dir=str(tmp_path))
    assert not {e.question for e in made} & {e.question for e in dev}


def test_a_corpus_that_is_too_small_says_which_length_it_fills(tmp_path: Path) -> None:
    _squad(tmp_path)
    with pytest.raises(ValueError, match=r"qa_1: the data give \d+ tokens, too few for context_length=20000") as caught:
        _examples("qa_1", 1, 20_000, qa_data_dir=str(tmp_path))
    most = int(re.search(r"use context_length=(\d+) or less", str(caught.value)).group(1))  # type: ignore[union-attr]
    assert len(_examples("qa_1", 1, most, qa_data_dir=str(tmp_path))) == 1


def test_a_small_file_says_so_instead_of_ending_early(tmp_path: Path) -> None:
    paragraph = {"context": "The colour is red.", "qas": [{"question": "Colour?", "answers": [{"text": "red"}]}]}
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    assert Ruler(subsets=("qa_1",), qa_data_dir=str(tmp_path)).fingerprint()
    with pytest.raises(ValueError, match="qa_1: the data give .* tokens, too few"):
        _examples("qa_1", 1, 1024, qa_data_dir=str(tmp_path))


def test_long_sentences_and_odd_spaces_of_files_are_no_obstacle(tmp_path: Path) -> None:
    """The last document is cut after a word, and texts stay as they are: an answer over two spaces is still found."""
    paragraphs = [
        {
            "context": f"Paragraph {i} says  twice{i}  spaced\nwords " + f"and then word{i} " * 150,
            "qas": [{"question": f"Q{i}?", "answers": [{"text": f"twice{i}  spaced\nwords"}]}],
        }
        for i in range(80)
    ]
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"paragraphs": [p]} for p in paragraphs]}))
    made = _examples("qa_1", 40, 2500, qa_data_dir=str(tmp_path))
    assert len(made) == 40
    for example in made:
        assert 0.9 * 2500 <= _MERGES.count(example) + example.max_new_tokens <= 2500
        assert [example.context[a:b] for a, b in example.answer_spans] == list(example.answers)


@pytest.mark.parametrize("hub_form", [True, False])
def test_hotpotqa_files(tmp_path: Path, hub_form: bool) -> None:
    rows = []
    for i in range(60):
        titles = [f"T{i}-{j}" for j in range(10)]
        texts = [[f"Text {title} begins. ", f"It goes on with a{title}."] for title in titles]
        facts = [[titles[3], 0], [titles[7], 1]]
        context: Any = [list(pair) for pair in zip(titles, texts, strict=True)]
        supporting: Any = facts
        if hub_form:
            context = {"title": titles, "sentences": texts}
            supporting = {"title": [title for title, _ in facts], "sent_id": [n for _, n in facts]}
        rows.append({"question": f"Q{i}?", "answer": f"aT{i}-7", "context": context, "supporting_facts": supporting})
    (tmp_path / "hotpotqa.json").write_text(json.dumps(rows))
    made = _examples("qa_2", 99, 1000, qa_data_dir=str(tmp_path))
    assert len(made) == 30
    documents = _documents(made[0])
    own = [text for text in documents if text.startswith("T0-")]
    assert len(own) == 10
    assert len(documents) > 10
    assert (made[0].answers, made[0].data_source) == (("aT0-7",), "hotpotqa")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a file of squad"),
        ('{"data": 3}', "is not a file of squad"),
        ('{"data": []}', "has no answerable question"),
        (
            '{"data": [{"paragraphs": [{"context": "", "qas": [{"question": "Q?", "answers": [{"text": "a"}]}]}]}]}',
            "squad",
        ),
        (
            '{"data": [{"paragraphs": [{"context": "C", "qas": [{"question": "Q?", "answers": [{"text": " "}]}]}]}]}',
            "blank",
        ),
        ('{"data": [{"paragraphs": [{"context": "C \\ud83d", "qas": []}]}]}', "half a character"),
        ("[" * 100_000, "is not a file of squad"),
        (None, "no data of qa_1"),
    ],
)
def test_bad_question_files_are_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "squad.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        Ruler(subsets=("qa_1",), qa_data_dir=str(tmp_path)).fingerprint()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": []}, "none of its supporting facts"),
        ({"context": [["T", "text"]]}, "sentences are 'text'"),
        ({"answer": None}, "answer is None|it must be text"),
        ({"answer": ""}, "blank"),
        ({"supporting_facts": [["Elsewhere", 0]]}, "none of its supporting facts"),
    ],
)
def test_bad_rows_of_hotpotqa_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    row = {"question": "Q?", "answer": "a", "context": [["T", ["Text a."]]], "supporting_facts": [["T", 0]]}
    (tmp_path / "hotpotqa.json").write_text(json.dumps([row | change]))
    with pytest.raises(ValueError, match=f"is not a file of hotpotqa.*({message})"):
        Ruler(subsets=("qa_2",), qa_data_dir=str(tmp_path)).fingerprint()


@pytest.mark.skipif(not (_SHARED / "squad").is_dir(), reason="samples of SQuAD and HotpotQA are not at hand")
@pytest.mark.parametrize("subset", ["qa_1", "qa_2"])
def test_real_questions(subset: str) -> None:
    made = _examples(subset, 40, 6000, qa_data_dir=str(_SHARED))
    assert len(made) == 40
    for example in made:
        total = _MERGES.count(example) + example.max_new_tokens
        assert 0.9 * 6000 <= total <= 6000
        assert subset == "qa_2" or any(answer in example.context for answer in example.answers)


def test_word_counts_of_the_table() -> None:
    long, short = repeats(32_768), repeats(4095)
    assert (long.common, long.uncommon, long.shot_words, long.shot_common, long.shot_uncommon) == (30, 3, 40, 10, 3)
    assert (short.common, short.uncommon, short.answers) == (6, 1, 10)
