"""GSM8K: our own problems are worked out again, files and Hub sets are read or refused, prompts have the known form."""

from __future__ import annotations

import ast
import json
import operator
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub_sets
import pytest
from small_tokenizers import byte_tokenizer, merging_tokenizer

from qevict_bench.models import LoadedModel
from qevict_bench.protocol import Protocol
from qevict_bench.task import Example, Prompter
from tasks.gsm8k import Gsm8k, fixture, hub
from tasks.gsm8k.problems import asked, last_sentence, problem

_ROOT = Path(__file__).parents[1]
_OFFICIAL = _ROOT.parent / "shared" / "data" / "gsm8k"
_CHAT = Prompter(byte_tokenizer(), chat=True)
_PLAIN = Prompter(merging_tokenizer(chat=False), chat=False)
_official = pytest.mark.skipif(not (_OFFICIAL / "test.jsonl").is_file(), reason="the official test.jsonl is not here")

Rows = list[dict[str, Any]]


def made(task: Gsm8k, limit: int = 9999, seed: int = 0, split: str = "test") -> list[Example]:
    return list(task.examples(_PLAIN, limit, seed, split))


def row(name: str, number: int) -> dict[str, str]:
    answer = f"Half is <<{2 * number}/2={number}>>{number}.\n#### {number}"
    return {"question": f"{name} has {2 * number} nuts. She eats half. How many are left?", "answer": answer}


def rows(name: str, count: int, first: int = 1) -> Rows:
    return [row(name, number) for number in range(first, first + count)]


def write(path: Path, lines: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five problems in test, twenty in train."""
    write(tmp_path / "data" / "test.jsonl", rows("Ann", 5))
    write(tmp_path / "data" / "train.jsonl", rows("Bea", 20))
    return tmp_path / "data"


def local(folder: Path, **fields: Any) -> Gsm8k:
    return Gsm8k(source="local", data_dir=str(folder), **fields)


# our own problems

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}

# Opening of the question -> the answer from the numbers in it, worked out apart from the texts of the solutions.
_ANSWERS: dict[str, Callable[..., float]] = {
    "A baker": lambda trays, rolls, sold: trays * rolls - sold,
    "Nora reads": lambda monday, more, book: book - 2 * monday - more,
    "A bus": lambda start, on, off: (start + on - off) / 2,
    "Tickets for": lambda adult, child, each: each * adult + each * child,
    "A gardener": lambda lines, tulips, price: (lines * tulips - tulips) * price,
    "Sam saves": lambda weekly, weeks, lamp: weekly * weeks - lamp,
    "A mill": lambda sacks, hours, days: sacks * days * hours,
    "Lena is": lambda age, times, years: times * age + years,
    "A rope": lambda meters, pieces, cut: meters / pieces - cut,
    "A cook": lambda eggs, cakes, has: cakes * eggs - has,
    "At noon": lambda noon, fall, hours: noon - hours * fall,
    "A printer": lambda posters, spoiled, schools: posters * (100 - spoiled) / 100 / schools,
    "A box": lambda red, blue, out: red - out + blue,
    "Omar walks": lambda there, back, days, weeks: weeks * days * (there + back),
    "A shop": lambda pens, pack, price: pens * price / pack,
    "A tank": lambda liters, pump, minutes: liters - minutes * pump,
    "Ida has": lambda stamps, each, friends: stamps - friends * each,
    "A farm": lambda goats, times, born: (times + 1) * goats + born,
    "A coat": lambda coat, hat, less: coat - less + hat,
    "Three friends": lambda a, b, c: (a + b + c) / 3,
}


def worked_out(term: ast.expr) -> float:
    if isinstance(term, ast.BinOp):
        result: float = _OPERATORS[type(term.op)](worked_out(term.left), worked_out(term.right))
        return result
    assert isinstance(term, ast.Constant)
    assert isinstance(term.value, int)
    return term.value


@pytest.mark.parametrize("split", ["test", "train"])
def test_the_answers_of_our_own_problems(split: str) -> None:
    for line in fixture.rows(split):
        question, answer = line["question"], line["answer"]
        numbers = [int(number) for number in re.findall(r"\d+", question)]
        right = _ANSWERS[" ".join(question.split()[:2])](*numbers)
        assert re.fullmatch(r"-?\d{1,3}(,\d{3})*", answer.rpartition("\n#### ")[2]), answer
        assert int(answer.rpartition("#### ")[2].replace(",", "")) == right
        steps = re.findall(r"(\d+(?: [-+*/] \d+)+) = \$?(-?\d+)", answer)
        assert [worked_out(ast.parse(term, mode="eval").body) for term, _ in steps] == [int(x) for _, x in steps]
        assert int(steps[-1][1]) == right
        known = {*numbers, 1, 2, 3, 100}  # one row, half, there and back, three friends, percent
        for term, result in steps:
            assert {int(number) for number in re.findall(r"\d+", term)} <= known, answer
            known.add(int(result))


def test_the_fixture_has_enough_problems_none_twice_no_story_in_both_splits() -> None:
    data = fixture.load()
    assert (len(data.test), len(data.train), len(fixture.shots())) == (48, 24, 8)
    assert len({problem.question for problem in data.test + data.train}) == 72
    stories = [{" ".join(p.question.split()[:2]) for p in part} for part in (data.test, data.train, fixture.shots())]
    assert [len(part) for part in stories] == [12, 8, 8]
    assert not stories[0] & stories[1]
    assert any("," in problem.number for problem in data.test)
    assert any("-" in problem.number for problem in data.test)


# prompts


@pytest.mark.parametrize("prompter", [_CHAT, _PLAIN], ids=["chat", "plain"])
def test_the_prompt_with_shots(folder: Path, prompter: Prompter) -> None:
    example = next(local(folder, shots=2).examples(prompter, 1, 0, "test"))
    text = prompter.tokenizer.decode(prompter.encode(example).ids)
    bodies = [f"Question: {line['question']}\nAnswer:" for line in rows("Bea", 20)]
    answers = [f"Half is {number}.\n#### {number}" for number in range(1, 21)]
    drawn = [bodies.index(user) for user, _ in example.shots]
    asks = f"Question: {rows('Ann', 1)[0]['question']}\nAnswer:"
    if prompter.chat:
        turns = "".join(f"<|start|>user\n{bodies[i]}<|end|>\n<|start|>assistant\n{answers[i]}<|end|>\n" for i in drawn)
        assert text == f"<s>{turns}<|start|>user\n{asks}<|end|>\n<|start|>assistant\n"
    else:
        assert text == "<s>" + "".join(f"{bodies[i]} {answers[i]}\n\n" for i in drawn) + asks
    assert (example.context, example.question, example.answer_prefix) == ("", asks, "")
    assert (example.answers, example.gold) == (("1",), "Half is 1.\n#### 1")
    assert (example.id, example.subset, example.group, example.max_new_tokens) == ("gsm8k-0000", "gsm8k", "", 256)


def test_the_prompt_without_shots(folder: Path) -> None:
    task = local(folder, shots=0, max_new_tokens=7)
    example = made(task)[0]
    assert example.context == "Question: Ann has 2 nuts. She eats half."
    assert example.question == " How many are left?\nAnswer:"
    assert (example.shots, example.max_new_tokens, task.shots_source) == ((), 7, "none")
    assert example.data_source == "gsm8k test, shots none"


@pytest.mark.parametrize(
    ("question", "context"),
    [
        ("What is 2 + 2?", "Question:"),
        ("A pen is $1.50. How much are two?", "Question: A pen is $1.50."),
        ('He said "stop!"  How often?', 'Question: He said "stop!"'),
        ("One.\nTwo? Three. Four", "Question: One.\nTwo? Three."),
        ("...", "Question:"),
    ],
)
def test_the_last_sentence_is_the_question(question: str, context: str) -> None:
    found = problem({"question": question, "answer": "#### 1"}, "here")
    assert asked(found)[: last_sentence(found)] == context
    assert asked(found) == f"Question: {question}\nAnswer:"


@pytest.mark.parametrize("shots", [8, 5, 1, 0])
@pytest.mark.parametrize("prompter", [_CHAT, _PLAIN], ids=["chat", "plain"])
def test_something_stands_before_every_question(prompter: Prompter, shots: int) -> None:
    heads = set()
    for example in Gsm8k(shots=shots).examples(prompter, 48, 3, "test"):
        prompt = prompter.encode(example)
        assert len(Protocol("query_agnostic").steps(prompt)[0]) == prompt.context_tokens > 10
        assert prompt.boundary_tokens == 0
        heads.add(prompt.ids[: prompt.context_tokens])
    assert len(heads) == (1 if shots else 48), "the shots are the same for all"


@_official
@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
@pytest.mark.parametrize("shots", [8, 0])
def test_official_prompts_of_the_embedded_models(request: pytest.FixtureRequest, model: str, shots: int) -> None:
    loaded: LoadedModel = request.getfixturevalue(model)
    prompter = Prompter(loaded.tokenizer, loaded.chat)
    for example in local(_OFFICIAL, shots=shots).examples(prompter, 30 if shots else 300, 0, "test"):
        prompt = prompter.encode(example)
        assert 0 < prompt.context_tokens < len(prompt.ids)
        assert prompt.boundary_tokens == 0
        shown = loaded.tokenizer.decode(prompt.ids[: prompt.context_tokens])
        assert shown.endswith(example.context.rstrip()) if not shots else example.question not in shown
        assert len(prompter.continuation(example)) > 3


# shots and splits


def test_shots_come_from_train_by_the_seed(folder: Path) -> None:
    task = local(folder)
    examples = made(task)
    assert len(examples) == 5
    assert len({example.shots for example in examples}) == 1
    assert len({user for user, _ in examples[0].shots}) == 8
    assert all("Bea" in user for user, _ in examples[0].shots)
    assert {example.data_source for example in examples} == {"gsm8k test, shots train"}
    assert (task.shots_source, task.prompt_source, task.splits) == ("train", "official", ("test", "dev"))
    assert made(task, seed=1)[0].shots != examples[0].shots
    assert [example.question for example in made(task, seed=1)] == [example.question for example in examples]


def test_without_a_train_file_shots_are_our_own_and_the_row_says_so(folder: Path) -> None:
    (folder / "train.jsonl").unlink()
    task = local(folder)
    (example, *_) = made(task)
    assert {user for user, _ in example.shots} == {asked(shot) for shot in fixture.shots()}
    assert (example.data_source, task.shots_source) == ("gsm8k test, shots own", "own")
    assert task.splits == ("test",)
    with pytest.raises(ValueError, match="split='dev' is not there with source=local; use test, or add a train split"):
        made(task, split="dev")
    with pytest.raises(ValueError, match=r"shots=9 is too many: there are 8 worked problems of our own.*train\.jsonl"):
        local(folder, shots=9).fingerprint()


def test_the_fixture_says_that_its_shots_are_our_own() -> None:
    task = Gsm8k()
    assert (task.prompt_source, task.shots_source, task.splits) == ("own", "own", ("test", "dev"))
    assert made(task)[0].data_source == "fixture test, shots own"


def test_dev_test_and_shots_share_no_problem(folder: Path) -> None:
    write(folder / "train.jsonl", [*rows("Bea", 20), *rows("Ann", 5), *rows("Bea", 3)])  # leaks and repetitions
    for task, size in ((local(folder, shots=5), 15), (Gsm8k(), 16)):
        for seed in range(20):
            dev = made(task, seed=seed, split="dev")
            test = made(task, seed=seed)
            shots = {user for user, _ in test[0].shots}
            assert shots == {user for user, _ in dev[0].shots}
            parts = [{example.question for example in dev}, {example.question for example in test}, shots]
            assert sum(map(len, parts)) == len(set.union(*parts))
            assert len(dev) == len(parts[0]) == size
            assert len({example.id for example in dev}) == len(dev)


@pytest.mark.parametrize("split", ["test", "dev"])
def test_an_example_does_not_depend_on_limit(split: str) -> None:
    task = Gsm8k(shots=5)
    every = made(task, split=split)
    for limit in (1, 7, 13):
        assert made(task, limit, split=split) == every[:limit]


def test_another_process_makes_the_same_examples() -> None:
    code = (
        "import hashlib; from tasks.gsm8k import Gsm8k; task = Gsm8k();"
        "found = [list(task.examples(None, 99, 5, split)) for split in ('test', 'dev')];"
        "print(task.fingerprint(), hashlib.sha256(repr(found).encode()).hexdigest())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=_ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().split()[0] == Gsm8k().fingerprint()


def test_the_fingerprint_follows_the_problems(folder: Path, tmp_path: Path) -> None:
    before = local(folder).fingerprint()
    assert len({before, Gsm8k().fingerprint()}) == 2
    for name in ("test", "train"):
        lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for column in ("question", "answer"):
            changed = [*lines[:-1], {**lines[-1], column: f"So. {lines[-1][column]}"}]
            write(tmp_path / column / f"{name}.jsonl", changed)
            other = {"test": "train", "train": "test"}[name]
            write(tmp_path / column / f"{other}.jsonl", rows("Bea" if other == "train" else "Ann", 20))
        write(tmp_path / "copy" / f"{name}.jsonl", lines)
    assert len({before, *(local(tmp_path / column).fingerprint() for column in ("question", "answer"))}) == 3
    assert local(tmp_path / "copy").fingerprint() == before
    (tmp_path / "copy" / "train.jsonl").unlink()
    assert local(tmp_path / "copy").fingerprint() != before


# scoring


def test_the_score_is_the_headline_and_both_metrics_are_there(folder: Path) -> None:
    example = made(local(folder))[4]
    assert example.answers == ("5",)
    for prediction, strict, flexible, invalid in [
        ("Half is 5.\n#### 5", 1, 1, (0, 0)),
        ("It is 5", 0, 1, (1, 0)),
        ("none", 0, 0, (1, 1)),
        ("#### 5 of 10", 1, 0, (0, 0)),
    ]:
        metrics = local(folder).metrics(prediction, example)
        assert metrics == {
            "strict": strict,
            "flexible": flexible,
            "invalid_strict": invalid[0],
            "invalid_flexible": invalid[1],
        }
        assert local(folder).score(prediction, example) == flexible
        assert local(folder, headline="strict").score(prediction, example) == strict


@pytest.mark.parametrize(
    "prediction",
    [
        "",
        ".",
        "-",
        "$",
        "#### ",
        "\x00\x1b\x7f",
        "\ud83d",
        "答案是四十二。",
        "9" * 1_000_000,
        "#" * 1_000_000,
        "- " * 500_000,
    ],
    ids=lambda text: repr(text[:3]),
)
def test_any_text_gets_a_score(prediction: str) -> None:
    task = Gsm8k()
    example = made(task, 1)[0]
    assert task.score(prediction, example) == 0
    assert set(task.metrics(prediction, example).values()) <= {0.0, 1.0}


def test_our_gold_texts_score_1() -> None:
    for headline in ("strict", "flexible"):
        task = Gsm8k(headline=headline)
        assert all(task.score(example.gold, example) == 1 for example in made(task) + made(task, split="dev"))


@_official
def test_the_official_test_file() -> None:
    task = local(_OFFICIAL)
    examples = made(task)
    numbers = [example.answers[0] for example in examples]
    assert len(examples) == 1319
    assert sum("," in number for number in numbers) == 14
    assert [number for number in numbers if "-" in number] == ["-10", "-3"]
    assert not any("." in number for number in numbers)
    assert not any("<<" in text or ">>" in text for example in examples for text in (example.gold, example.question))
    assert all(task.metrics(example.gold, example)["strict"] == 1 for example in examples)
    lines = [json.loads(line) for line in (_OFFICIAL / "test.jsonl").read_bytes().splitlines()]
    assert sum("<<" in line["answer"] for line in lines) == 1301
    assert all(
        example.question.startswith(f"Question: {lines[i]['question'].strip()}\n") for i, example in enumerate(examples)
    )
    assert sum(example.context == "Question:" for example in made(local(_OFFICIAL, shots=0))) == 16


# mistakes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "web"}, "source='web' is unknown; use one of fixture, local, hub"),
        ({"source": "local"}, "data_dir is empty, but source=local needs it; set task.data_dir"),
        ({"source": "hub"}, "hub_id is empty, but source=hub needs it; set task.hub_id"),
        ({"data_dir": "x"}, "data_dir='x' is not used with source=fixture; set task.source=local"),
        ({"source": "local", "data_dir": "x", "hub_id": "y"}, "hub_id='y' is not used with source=local"),
        ({"shots": -1}, "shots=-1 is too small; use 0 or more"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is too small; use 1 or more"),
        ({"headline": "loose"}, "headline='loose' is unknown; use one of flexible, strict"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Gsm8k(**fields)


def test_bad_arguments_are_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="limit=0 asks for no example"):
        made(local(folder), 0)
    with pytest.raises(ValueError, match="split='train' is not there with source=fixture"):
        made(Gsm8k(), split="train")
    with pytest.raises(ValueError, match="shots=21 is too many: there are 20 worked problems of the train split"):
        local(folder, shots=21).fingerprint()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "a', "line 2: not a JSON object"),
        (b"[" * 100_000, "line 2: not a JSON object"),
        (b'"\xff"', "line 2: not a JSON object"),
        (b"[1]", "line 2: no column question or answer"),
        (b'{"question": "a?"}', "line 2: no column question or answer"),
        (b'{"question": 3, "answer": "#### 1"}', "line 2: question is 3; it must be text"),
        (b'{"question": " ", "answer": "#### 1"}', "line 2: question is ' '; it must be text"),
        (b'{"question": "a?", "answer": null}', "line 2: answer is None; it must be text"),
        (
            b'{"question": "a?", "answer": "It is 7."}',
            "line 2: answer does not end with '#### NUMBER', but with 'It is 7.'",
        ),
        (b'{"question": "a?", "answer": "#### many"}', "line 2: answer does not end with '#### NUMBER'"),
        (b'{"question": "a?", "answer": "#### 7\\nor 8"}', "line 2: answer does not end with '#### NUMBER'"),
        (b'{"question": "\\ud83d?", "answer": "#### 7"}', "line 2: question holds half a character"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["test.jsonl", "train.jsonl"])
def test_damaged_lines_are_named(folder: Path, name: str, line: bytes, message: str) -> None:
    path = folder / name
    first, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, line + b"\n", *others]))
    with pytest.raises(ValueError, match=re.escape(f"{name}, ") + re.escape(message)):
        local(folder).fingerprint()
    with pytest.raises(ValueError, match=re.escape(message)):
        made(local(folder))


def test_missing_and_empty_files_are_named(folder: Path) -> None:
    for content in (b"", b" \n\n"):
        (folder / "test.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match=r"test\.jsonl is empty; take it anew"):
            local(folder).fingerprint()
    (folder / "test.jsonl").unlink()
    with pytest.raises(ValueError, match=r"data_dir='.*' has no readable test\.jsonl .*grade-school-math"):
        local(folder).fingerprint()
    write(folder / "test.jsonl", rows("Bea", 20))
    with pytest.raises(ValueError, match=r"train\.jsonl has no problem that test\.jsonl does not have"):
        local(folder).fingerprint()


def test_blank_lines_a_byte_order_mark_and_windows_line_ends_do_no_harm(folder: Path) -> None:
    before = made(local(folder))
    content = (folder / "test.jsonl").read_bytes()
    (folder / "test.jsonl").write_bytes(b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n\r\n"))
    assert made(local(folder)) == before


# sets of the Hub


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.load.cache_clear()
    hub_sets.no_network(monkeypatch, tmp_path)


def write_set(folder: Path, splits: dict[str, Rows], names: tuple[str, ...] = ("main", "socratic")) -> Path:
    """A set in the form of openai/gsm8k; "socratic" has other answers."""

    def told(name: str, members: Rows) -> Rows:
        return [{**line, "answer": "Why?\n#### 999"} for line in members] if name == "socratic" else members

    return hub_sets.write(
        folder, {name: {split: told(name, members) for split, members in splits.items()} for name in names}
    )


def from_hub(hub_id: Path | str, **fields: Any) -> Gsm8k:
    return Gsm8k(source="hub", hub_id=str(hub_id), **fields)


@pytest.mark.usefixtures("no_network")
def test_a_local_copy_of_a_set(tmp_path: Path, folder: Path) -> None:
    copy = write_set(tmp_path / "copy", {"train": rows("Bea", 20), "test": rows("Ann", 5)})
    task = from_hub(copy)
    ours, files = made(task), made(local(folder))
    assert [(e.question, e.shots, e.gold, e.id) for e in ours] == [(e.question, e.shots, e.gold, e.id) for e in files]
    assert ours[0].data_source == f"{copy} test, shots train"
    assert (task.prompt_source, task.shots_source, len(made(task, split="dev"))) == ("official", "train", 12)
    assert task.fingerprint() == local(folder).fingerprint()


@pytest.mark.usefixtures("no_network")
def test_a_set_with_a_test_split_alone(tmp_path: Path) -> None:
    task = from_hub(write_set(tmp_path / "copy", {"test": rows("Ann", 5)}, ("default",)))
    assert (len(made(task)), task.shots_source) == (5, "own")
    with pytest.raises(ValueError, match="split='dev' is not there with source=hub"):
        made(task, split="dev")


@pytest.mark.usefixtures("no_network")
def test_without_a_network_the_message_holds_the_command() -> None:
    command = "`hf download openai/gsm8k --repo-type dataset --local-dir DIR`"
    with pytest.raises(ValueError, match=f"^hub_id='openai/gsm8k' is no folder here.*{command}.*task.hub_id=DIR$"):
        from_hub("openai/gsm8k").fingerprint()


@pytest.mark.usefixtures("no_network")
def test_mistaken_sets_are_named(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    with pytest.raises(
        ValueError, match="hub_id='.*bare': .* cannot be read as a data set .*`hf download openai/gsm8k"
    ):
        from_hub(tmp_path / "bare").fingerprint()
    write_set(tmp_path / "train", {"train": rows("Bea", 20)})
    with pytest.raises(ValueError, match="hub_id='.*' has no problem in a split test, only train"):
        from_hub(tmp_path / "train").fingerprint()
    write_set(tmp_path / "other", {"test": [{"text": "a"}]}, ("main",))
    with pytest.raises(ValueError, match="other, test, row 0: no column question or answer"):
        from_hub(tmp_path / "other").fingerprint()
