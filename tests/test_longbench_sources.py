"""LongBench from official files, their zip, sets of the Hub in both forms, and a checkout's wording; damaged rows."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import zipfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import fakes
import hub_sets
import pytest
from script_modules import script
from small_tokenizers import byte_tokenizer

from qevict_bench import runner
from qevict_bench.results import RunFailed
from qevict_bench.task import Example, Prompter
from tasks.longbench import LongBench, files, fixture, hub, sources
from tasks.longbench.structure import BUCKETS, DATASETS

Rows = list[dict[str, Any]]
_PLAIN = Prompter(byte_tokenizer(chat=False), chat=False)
_DATA = Path(__file__).parents[2] / "shared" / "data" / "hotpotqa"


@pytest.fixture(autouse=True)
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    hub.archive.cache_clear()
    sources._warn.cache_clear()
    return hub_sets.no_network(monkeypatch, tmp_path)


def made(task: LongBench, limit: int = 999) -> list[Example]:
    return list(task.examples(_PLAIN, limit, 0, "test"))


def official_rows(dataset: str, count: int = 3) -> Rows:
    return list(islice(fixture.rows(dataset, 7, "test"), count))


def write(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def local(folder: Path, *subsets: str, **fields: Any) -> LongBench:
    return LongBench(source="local", data_dir=str(folder), subsets=subsets, **fields)


def texts(examples: list[Example]) -> list[Any]:
    return [(x.id, x.context, x.question, x.answers, x.classes, x.max_new_tokens, x.chat) for x in examples]


# official files


@pytest.mark.parametrize("place", ["", "data", "data.zip", "zip"])
def test_files_in_a_folder_and_in_the_zip(tmp_path: Path, place: str) -> None:
    names = [*DATASETS, "hotpotqa_e"]
    folder = tmp_path / "files"
    for name in names:
        write(folder / ("data" if place == "data" else "") / f"{name}.jsonl", official_rows(name.removesuffix("_e")))
    if "zip" in place:
        pack(folder, tmp_path / "packed" / "data.zip")
        folder = tmp_path / "packed" / ("data.zip" if place == "zip" else "")
    examples = made(local(folder, *DATASETS))
    own = list(LongBench(preset="all_en").examples(_PLAIN, 3, 7, "test"))
    assert texts(examples) == texts(own)
    assert {example.data_source for example in examples} == {"longbench"}
    assert [x.id for x in made(local(folder, "hotpotqa_e"))] == [f"hotpotqa_e/0-4k-{i:04d}" for i in range(3)]
    task = local(folder, "hotpotqa")
    assert (task.splits, task.prompt_source) == (("test",), "own")


def pack(folder: Path, archive: Path) -> None:
    """In the form of the official data.zip: everything under data/."""
    archive.parent.mkdir(parents=True)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("__MACOSX/data/._hotpotqa.jsonl", b"\0")
        packed.writestr("__MACOSX/data/hotpotqa.jsonl", b"\0")
        for path in folder.glob("*.jsonl"):
            packed.write(path, f"data/{path.name}")


def test_items_of_one_context_are_one_group(tmp_path: Path) -> None:
    rows = official_rows("qasper", 3)
    rows[2]["context"] = rows[0]["context"]
    write(tmp_path / "qasper.jsonl", rows)
    groups = [example.group for example in made(local(tmp_path, "qasper"))]
    assert groups[0] == groups[2] != groups[1]


def test_ranges_of_longbench_e(tmp_path: Path) -> None:
    lengths = [0, 3999, 4000, 7999, 8000, 10**30]
    rows = [{**row, "length": n} for row, n in zip(official_rows("trec", 6), lengths, strict=True)]
    write(tmp_path / "trec_e.jsonl", rows)
    ids = [example.id for example in made(local(tmp_path, "trec_e"))]
    assert ids == [f"trec_e/{bucket}-{i:04d}" for bucket, i in zip(sorted([*BUCKETS] * 2), range(6), strict=True)]
    assert [example.id for example in made(local(tmp_path, "trec_e"), 1)] == ids[::2]
    (bare,) = made(local(tmp_path, "trec_e/8k+"), 1)
    assert (bare.subset, bare.chat, bare.max_new_tokens) == ("trec_e/8k+", False, 64)
    assert local(tmp_path, "trec_e").score(bare.answers[0], bare) == 1


def test_the_fingerprint_follows_the_data_and_the_wording(tmp_path: Path) -> None:
    rows = official_rows("hotpotqa")
    write(tmp_path / "a" / "hotpotqa.jsonl", rows)
    before = local(tmp_path / "a", "hotpotqa").fingerprint()
    write(tmp_path / "b" / "hotpotqa.jsonl", [*rows[:-1], {**rows[-1], "input": "Why?"}])
    checkout(tmp_path / "repo")
    others = [
        local(tmp_path / "b", "hotpotqa").fingerprint(),
        local(tmp_path / "a", "hotpotqa", prompts_dir=str(tmp_path / "repo")).fingerprint(),
        LongBench(subsets=("hotpotqa",)).fingerprint(),
    ]
    assert len({before, *others}) == 4
    write(tmp_path / "c" / "hotpotqa.jsonl", rows)
    pack(tmp_path / "c", tmp_path / "d" / "data.zip")
    assert before == local(tmp_path / "c", "hotpotqa").fingerprint() == local(tmp_path / "d", "hotpotqa").fingerprint()


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf\n"])
def test_a_file_without_rows_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trec.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"trec\.jsonl has no rows; fetch the data anew with `hf download"):
        local(tmp_path, "trec").fingerprint()


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    long = "x" * 300
    for task, field in (
        (local(Path(long), "trec"), "data_dir"),
        (LongBench(prompts_dir=long), "prompts_dir"),
        (from_hub(long, "trec"), "hub_id"),
    ):
        with pytest.raises(ValueError, match=f"^{field}='{long}'"):
            task.fingerprint()


def test_classes_of_stored_predictions_come_from_the_data(tmp_path: Path) -> None:
    rows = official_rows("trec")
    write(tmp_path / "trec.jsonl", [{**rows[0], "all_classes": None}, *rows[1:]])
    example = dataclasses.replace(made(local(tmp_path, "trec"))[1], classes=())
    assert local(tmp_path, "trec").score(example.answers[0], example) == 1.0
    write(tmp_path / "trec.jsonl", [{**rows[0], "all_classes": None}])
    with pytest.raises(ValueError, match="no row of trec has classes"):
        local(tmp_path, "trec").score(example.answers[0], example)


def test_missing_files_are_named_with_the_command(tmp_path: Path) -> None:
    command = "`hf download zai-org/LongBench data.zip --repo-type dataset --local-dir DIR`"
    with pytest.raises(ValueError, match=f"data_dir='.*' has no trec.jsonl, .*{command} and set task.data_dir=DIR"):
        local(tmp_path, "trec").fingerprint()
    write(tmp_path / "x" / "trec.jsonl", official_rows("trec"))
    pack(tmp_path / "x", tmp_path / "p" / "data.zip")
    with pytest.raises(ValueError, match=r"data\.zip has no lcc\.jsonl; take lcc out of task\.subsets"):
        local(tmp_path / "p", "lcc").fingerprint()
    content = bytearray((tmp_path / "p" / "data.zip").read_bytes())
    for damaged in (b"zip", content[: len(content) // 2], content[:400] + b"\0" * 99 + content[499:]):
        (tmp_path / "p" / "data.zip").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"trec\.jsonl cannot be read \(\w+: .*fetch the data anew with"):
            local(tmp_path / "p", "trec").fingerprint()


# damaged rows

_BAD: dict[str, tuple[bytes, str]] = {
    "bad UTF-8": (b'{"input": "\xff\xfe", "context": "a"}', "not a JSON object"),
    "half a line": (b'{"input": "a', "not a JSON object"),
    "nested": (b"[" * 100_000, "not a JSON object"),
    "a list": (b"[1]", "it is no JSON object, but [1]"),
    "null": (b"null", "it is no JSON object, but None"),
    "no input": (b'{"context": "a", "answers": ["b"]}', "no input"),
    "no answers": (b'{"context": "a", "input": "b", "answers": null}', "no answers"),
    "nothing": (b"{}", "no context, input, answers"),
    "a number": (b'{"context": 3, "input": "b", "answers": ["c"]}', "context is 3; it must be text"),
    "a string": (b'{"context": "a", "input": "b", "answers": "c"}', "answers is 'c'; it must be a non-empty list"),
    "no answer": (b'{"context": "a", "input": "b", "answers": []}', "answers is []; it must be a non-empty list"),
    "half a character": (b'{"context": "\\ud83d", "input": "b", "answers": ["c"]}', "context holds half a character"),
    "huge": (b'{"input": "' + b"x" * (files._LONGEST + 5) + b'"}', "the line is longer than 16 MiB"),
}


def mixed(path: Path) -> dict[int, str]:
    """40 lines: good ones, every bad one, one with the id of line 1; line number -> what is wrong."""
    good = official_rows("hotpotqa", 26)
    lines = [json.dumps(row).encode() for row in good]
    lines[5] = json.dumps({**good[5], "context": "long " * 300_000}).encode()  # large, but good
    wrong = {}
    for number, (line, message) in enumerate(_BAD.values()):
        lines.insert(3 * number + 1, line)
        wrong[3 * number + 2] = message
    lines.append(json.dumps({**good[9], "_id": good[0]["_id"]}).encode())
    wrong[len(lines)] = f"_id '{good[0]['_id']}' is that of {path}, line 1 again"
    assert len(lines) == 40
    path.write_bytes(b"\n".join(lines))
    return wrong


def test_every_bad_line_is_named_and_the_rest_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "hotpotqa.jsonl"
    wrong = mixed(path)
    task = local(tmp_path, "hotpotqa")
    examples = made(task)
    assert [example.id for example in examples] == [f"hotpotqa-{i:04d}" for i in range(40)]
    problems = {i + 1: example.problem for i, example in enumerate(examples) if example.problem}
    assert problems.keys() == wrong.keys()
    for number, message in wrong.items():
        assert problems[number].startswith(f"{path}, line {number}: {message}")
        assert problems[number].endswith("; left out")
        assert len(problems[number]) < 400
    assert [record.message for record in caplog.records] == list(problems.values())
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    made(task)
    assert len(caplog.records) == len(problems), "once is enough"
    assert all(example.context and example.answers for example in examples if not example.problem)


def test_a_huge_first_line_behind_a_byte_order_mark_is_one_line(tmp_path: Path) -> None:
    huge = b"\xef\xbb\xbf" + b"x" * files._LONGEST
    good = json.dumps(official_rows("hotpotqa")[0]).encode()
    (tmp_path / "hotpotqa.jsonl").write_bytes(huge + b"\n" + good)
    found = list(files.rows(tmp_path, "hotpotqa"))
    assert [each.where[-6:] for each in found] == ["line 1", "line 2"]
    assert (found[0].problem, found[1].problem) == ("the line is longer than 16 MiB", "")


def test_a_run_goes_on_and_its_rows_name_bad_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "describe", fakes.describe)
    wrong = mixed(tmp_path / "hotpotqa.jsonl")

    def run() -> Any:
        cfg = fakes.config(tmp_path / "runs", limit=40, batch_size=4)
        task = {"source": "local", "data_dir": str(tmp_path), "subsets": ["hotpotqa"]}
        cfg.task = {"_target_": "tasks.longbench.LongBench", **task}
        cfg.model.max_context = 100_000_000
        return runner.run(cfg, fakes.ENGINE)

    summary = run()
    assert (summary.num_examples, summary.num_errors) == (40 - len(wrong), len(wrong))
    rows = [json.loads(line) for line in (tmp_path / "runs" / summary.run_id / "rows.jsonl").read_bytes().splitlines()]
    errors = {row["index"] + 1: row["error"] for row in rows if row["status"] == "error"}
    assert errors.keys() == wrong.keys()
    assert all(f"hotpotqa.jsonl, line {number}: {wrong[number]}" in error for number, error in errors.items())
    (tmp_path / "hotpotqa.jsonl").write_bytes(b"[]\n{}\n")
    with pytest.raises(RunFailed, match=r"the first failed with ValueError: .*hotpotqa\.jsonl, line 1: it is no JSON"):
        run()


@pytest.mark.parametrize(
    ("dataset", "change", "message"),
    [
        ("trec", {"all_classes": None}, "no all_classes"),
        ("trec", {"all_classes": []}, "all_classes is []"),
        ("trec", {"all_classes": [1]}, "all_classes is 1"),
        ("passage_retrieval_en", {"answers": ["7"]}, "answers is ['7']; each must name a paragraph"),
        ("hotpotqa_e", {"length": None}, "no length"),
        ("hotpotqa_e", {"length": "many"}, "length is 'many'; it must be a number of words"),
        ("hotpotqa_e", {"length": -1}, "length is -1"),
        ("hotpotqa_e", {"length": True}, "length is True"),
    ],
)
def test_what_a_dataset_needs(tmp_path: Path, dataset: str, change: dict[str, Any], message: str) -> None:
    rows = official_rows(dataset.removesuffix("_e"))
    write(tmp_path / f"{dataset}.jsonl", [{**rows[0], **change}, *rows[1:]])
    examples = made(local(tmp_path, dataset))
    assert f"{dataset}.jsonl, line 1: {message}" in examples[0].problem
    assert not any(example.problem for example in examples[1:])
    assert len(examples) == 3


def test_what_a_dataset_does_not_need_may_be_absent(tmp_path: Path) -> None:
    rows = [{name: row[name] for name in ("input", "context", "answers")} for row in official_rows("gov_report")]
    write(tmp_path / "gov_report.jsonl", rows)
    content = (tmp_path / "gov_report.jsonl").read_bytes()
    (tmp_path / "gov_report.jsonl").write_bytes(b"\xef\xbb\xbf\r\n" + content.replace(b"\n", b"\r\n\r\n"))
    examples = made(local(tmp_path, "gov_report"))
    assert [example.problem for example in examples] == [""] * 3


# the official wording

_TEMPLATES = {
    "hotpotqa": "Read on.\n{context}\n\n Then say: {input}\nWell:",
    "trec": "Kinds {{of}} things.\n\n{context}\n{input}",
    "lcc": "Code. \n{context}Next:\n",
    "repobench-p": "{input} first.\n{context}{input}Next:\n",
}


def checkout(root: Path, **changes: Any) -> Path:
    folder = root / "LongBench" / "config"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset2prompt.json").write_text(json.dumps(_TEMPLATES | changes))
    (folder / "dataset2maxlen.json").write_text(json.dumps(dict.fromkeys(_TEMPLATES, 9) | {"trec": 5}))
    return root


@pytest.mark.parametrize("below", ["", "LongBench", "LongBench/config"])
def test_the_wording_of_a_checkout(tmp_path: Path, below: str) -> None:
    checkout(tmp_path)
    subsets = tuple(_TEMPLATES)
    task = LongBench(subsets=subsets, prompts_dir=str(tmp_path / below))
    for example in made(task, 1):
        row = official_rows_of(example)
        whole = _TEMPLATES[example.subset].format(**row)
        assert example.context + example.question == whole
        assert example.context[example.instruction_chars :].startswith(row["context"])
        assert example.max_new_tokens == (5 if example.subset == "trec" else 9)
    assert task.prompt_source == "redrawn"
    first = made(task, 1)[0]
    assert first.question.startswith(" Then say: ")
    assert first.context.endswith("\n\n")
    for name in subsets:
        write(tmp_path / "data" / f"{name}.jsonl", official_rows(name))
    task = local(tmp_path / "data", *subsets, prompts_dir=str(tmp_path / below))
    assert task.prompt_source == "official"
    assert [x.context + x.question for x in made(task, 1)] == [
        _TEMPLATES[name].format(**official_rows(name)[0]) for name in subsets
    ]


def official_rows_of(example: Example) -> dict[str, Any]:
    return next(fixture.rows(example.subset, 0, "test"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hotpotqa": "no context {input}"}, "the template of hotpotqa cannot be used .*has the fields input; needed"),
        ({"hotpotqa": "{context}{context}"}, "needed are context once"),
        ({"hotpotqa": "{context}{answers[0].__class__}"}, "needed are context once"),
        ({"hotpotqa": "{context!r}"}, "a field has a format"),
        ({"hotpotqa": "{context:>1000000000}"}, "a field has a format"),
        ({"hotpotqa": "{context"}, "the template of hotpotqa cannot be used"),
        ({"hotpotqa": None}, r"dataset2prompt\.json has no template of hotpotqa"),
    ],
)
def test_templates_are_data(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    checkout(tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        LongBench(subsets=("hotpotqa",), prompts_dir=str(tmp_path)).fingerprint()


def test_a_damaged_checkout_is_named(tmp_path: Path) -> None:
    task = LongBench(subsets=("hotpotqa",), prompts_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"prompts_dir='.*dataset2prompt\.json is missing or damaged \(FileNotFoundE"):
        task.fingerprint()
    checkout(tmp_path)
    (tmp_path / "LongBench" / "config" / "dataset2maxlen.json").write_text('{"hotpotqa": "9"}')
    with pytest.raises(ValueError, match=r"dataset2maxlen\.json has no length of answers for hotpotqa"):
        task.fingerprint()
    (tmp_path / "LongBench" / "config" / "dataset2maxlen.json").write_text("[]")
    with pytest.raises(ValueError, match=r"dataset2maxlen\.json holds no JSON object"):
        task.fingerprint()


# sets of the Hub

_CUE = "Well:"


def kvpress_rows(dataset: str, count: int = 3) -> Rows:
    """In the columns of Xnhyacinth/LongBench: instructions around the context, a question, a cue."""
    return [
        {
            "context": f"Read on.\n{row['context']}\n\nThen say:\n\n",
            "question": f"Question: {row['input']}\n",
            "answer_prefix": _CUE,
            "answers": row["answers"],
            "all_classes": row["all_classes"],
            "length": row["length"],
            "dataset": dataset,
            "language": "en",
            "_id": row["_id"],
            "task": dataset,
            "max_new_tokens": DATASETS[dataset].new_tokens + 20,
        }
        for row in official_rows(dataset, count)
    ]


def from_hub(hub_id: Path | str, *subsets: str, **fields: Any) -> LongBench:
    return LongBench(source="hub", hub_id=str(hub_id), subsets=subsets, **fields)


def parquet_set(folder: Path) -> Path:
    names = ("hotpotqa", "trec", "gov_report")
    return hub_sets.write(folder, {name: {"test": kvpress_rows(name)} for name in names})


def test_a_set_in_kvpress_columns(tmp_path: Path, no_network: Path) -> None:
    hub_sets.move_to_cache(parquet_set(tmp_path / "set"), no_network, "Xnhyacinth/LongBench")
    task = from_hub("Xnhyacinth/LongBench", "hotpotqa", "trec", "gov_report")
    examples = made(task)
    known = [(name, row) for name in task.subsets for row in kvpress_rows(name)]
    for example, (name, row) in zip(examples, known, strict=True):
        assert (example.subset, example.context) == (name, row["context"])
        assert example.question == row["question"] + _CUE, "the whole prompt is the user's turn"
        assert (example.answer_prefix, example.answers) == ("", tuple(row["answers"]))
        assert example.classes == tuple(row["all_classes"] or ())
        assert (example.max_new_tokens, example.instruction_chars) == (DATASETS[name].new_tokens, -1)
        assert (example.data_source, example.problem) == ("Xnhyacinth/LongBench", "")
    assert task.prompt_source == "official"
    assert task.ending("hotpotqa").stop == ()
    assert len(task.fingerprint()) == 16
    with pytest.raises(ValueError, match="prompts_dir='x' is not used: Xnhyacinth/LongBench has its wording"):
        from_hub("Xnhyacinth/LongBench", "trec", prompts_dir="x").fingerprint()


def test_the_fingerprint_of_a_set_follows_lengths_and_ids(tmp_path: Path) -> None:
    found = set()
    for number, change in enumerate(({}, {"length": 7}, {"_id": "7"})):
        rows = kvpress_rows("trec")
        folder = hub_sets.write(tmp_path / str(number), {"trec": {"test": [{**rows[0], **change}, *rows[1:]]}})
        found.add(from_hub(folder, "trec").fingerprint())
    assert len(found) == 3


def test_a_local_copy_of_such_a_set(tmp_path: Path) -> None:
    folder = parquet_set(tmp_path / "copy")
    task = from_hub(folder, "trec")
    assert [example.id for example in made(task, 2)] == ["trec-0000", "trec-0001"]
    with pytest.raises(ValueError, match=r"hub_id='.*copy' has no lcc; its configurations: .*hotpotqa"):
        from_hub(folder, "lcc").fingerprint()


def test_the_official_set_is_a_zip(tmp_path: Path, no_network: Path) -> None:
    write(tmp_path / "files" / "hotpotqa.jsonl", official_rows("hotpotqa"))
    write(tmp_path / "files" / "trec_e.jsonl", official_rows("trec"))
    pack(tmp_path / "files", tmp_path / "set" / "data.zip")
    (tmp_path / "set" / "LongBench.py").write_text("raise SystemExit('this file must not run')")
    (tmp_path / "set" / "README.md").write_text("---\nlicense: mit\n---\n")
    hub_sets.move_to_cache(tmp_path / "set", no_network, "zai-org/LongBench")
    task = from_hub("zai-org/LongBench", "hotpotqa", "trec_e")
    assert [x.context for x in made(task)] == [x.context for x in made(local(tmp_path / "files", "hotpotqa", "trec_e"))]
    assert (task.prompt_source, task.fingerprint()) == ("own", local(tmp_path / "files", *task.subsets).fingerprint())
    worded = from_hub("zai-org/LongBench", "hotpotqa", prompts_dir=str(checkout(tmp_path / "repo")))
    assert worded.prompt_source == "official"
    with pytest.raises(ValueError, match=r"hub_id='zai-org/LongBench'.*has no lcc\.jsonl"):
        from_hub("zai-org/LongBench", "lcc").fingerprint()


def test_bad_rows_of_a_set_are_named(tmp_path: Path) -> None:
    rows = kvpress_rows("gov_report")
    rows[1]["question"] = None
    rows[2]["_id"] = rows[0]["_id"]
    folder = hub_sets.write(tmp_path / "set", {"gov_report": {"test": rows}})
    problems = [example.problem for example in made(from_hub(folder, "gov_report"))]
    assert problems[0] == ""
    assert problems[1] == f"{folder}, gov_report, row 1: no question; left out"
    assert re.search(r"row 2: _id '\w+' is that of .*, row 0 again; left out", problems[2])


@pytest.mark.parametrize("name", ["zai-org/LongBench", "Xnhyacinth/LongBench"])
def test_without_a_network_the_message_holds_the_command(name: str) -> None:
    command = f"`hf download {name} --repo-type dataset --local-dir DIR`"
    with pytest.raises(ValueError, match=f"^hub_id='{name}' is no folder here.*{command}.*task.hub_id=DIR$"):
        from_hub(name, "trec").fingerprint()


# rows from HotpotQA


def questions(form: Callable[[list[tuple[str, list[str]]]], Any]) -> Rows:
    return [
        {
            "question": f"Which {i}?",
            "answer": f"w{i}",
            "context": form([(f"T{i}-{j}", [f"Line of w{i}.", " More words here."]) for j in range(10)]),
        }
        for i in range(4)
    ]


def hub_form(pairs: list[tuple[str, list[str]]]) -> Any:
    return {"title": [title for title, _ in pairs], "sentences": [sentences for _, sentences in pairs]}


def test_rows_from_either_form_of_hotpotqa(tmp_path: Path) -> None:
    module = script("longbench_rows")
    rows = list(module.rows(questions(hub_form)))
    assert rows == list(module.rows(questions(lambda pairs: [list(pair) for pair in pairs])))
    assert rows[1]["context"].startswith("Passage 1:\nT1-0\nLine of w1. More words here.\n\nPassage 2:\nT1-1\n")
    assert rows[1]["length"] == len(f"Which 1? {rows[1]['context']} w1".split())
    write(tmp_path / "hotpotqa.jsonl", rows)
    examples = made(local(tmp_path, "hotpotqa"))
    assert [example.answers for example in examples] == [("w0",), ("w1",), ("w2",), ("w3",)]
    assert not any(example.problem for example in examples)


def test_rows_filled_up_with_other_passages() -> None:
    module = script("longbench_rows")
    for row, question in zip(module.rows(questions(hub_form), words=200), questions(hub_form), strict=True):
        found = re.findall(r"^Passage (\d+):\n(.*)$", row["context"], re.MULTILINE)
        assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
        titles = [title for _, title in found]
        assert len(titles) == len(set(titles))
        assert set(question["context"]["title"]) < set(titles)
        assert 200 <= row["length"] <= 220
    with pytest.raises(ValueError, match="all passages of the file together have"):
        list(module.rows(questions(hub_form), words=5000))


@pytest.mark.skipif(not _DATA.is_dir(), reason="the HotpotQA questions are not here")
def test_the_100_questions(tmp_path: Path) -> None:
    module = script("longbench_rows")
    [path] = _DATA.glob("*.json")
    write(tmp_path / "hotpotqa.jsonl", list(module.rows(json.loads(path.read_text(encoding="utf-8")))))
    task = local(tmp_path, "hotpotqa")
    examples = made(task)
    assert len(examples) == 100
    assert not any(example.problem for example in examples)
    assert {task.score(example.answers[0], example) for example in examples} == {1.0}


@pytest.mark.parametrize(("option", "value"), [("--limit", "-1"), ("--words", "-5")])
def test_a_count_below_0_is_refused(
    option: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["longbench_rows.py", "x.json", "--out", str(tmp_path), f"{option}={value}"])
    with pytest.raises(SystemExit, match="2"):
        script("longbench_rows").main()
    assert f"{option} {value}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
