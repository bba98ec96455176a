"""RULER from a checkout of its repository, and from sets in kvpress' columns: both written here in their form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import hub_sets
import pytest
from small_tokenizers import merging_tokenizer

from qevict_bench.task import Prompter
from tasks.ruler import Ruler
from tasks.ruler.structure import NIAH, OFFICIAL_NEW_TOKENS, SUBSETS

_MERGES = Prompter(merging_tokenizer(chat=False), chat=False)

_CONSTANTS = '''
TASKS = {
    'niah': {
        'tokens_to_generate': 128,
        'template': "Some secret {type_needle_v} are below.\\n{context}\\n"
        "What are all the secret {type_needle_v} of {query}?",
        'answer_prefix': """ The secret {type_needle_v} of {query} are""",
    },
    'variable_tracking': {
        'tokens_to_generate': 30,
        'template': """Follow the names.\\n\\n{context}\\nQuestion: Which names have {query}?""",
        'answer_prefix': """ Answer: {num_v} names have {query}: """,
    },
    'common_words_extraction': {
        'tokens_to_generate': 120,
        'template': """A list.\\n{context}\\nQuestion: Which 10 words?""",
        'answer_prefix': """ Answer: the words:""",
    },
    'freq_words_extraction': {
        'tokens_to_generate': 50,
        'template': """Coded. {context}\\nQuestion: Which three?""",
        'answer_prefix': """ Answer: the three:""",
    },
    'qa': {
        'tokens_to_generate': 32,
        'template': """Answer it.\\n\\n{context}\\n\\nAnswer it.\\n\\nQuestion: {query}""",
        'answer_prefix': """ Answer:""",
    },
}
raise SystemExit("this file must not run")
'''
_NIAH = """
needle = "One secret {type_needle_v} of {key} is: {value}."
if args.type_haystack == 'essay':
    haystack = re.sub(r'\\s+', " ", essay).split(" ")
elif args.type_haystack == 'noise':
    haystack = "Grey noise. More noise."
elif args.type_haystack == 'needle':
    haystack = needle
raise SystemExit("this file must not run")
"""
_VT = """
def generate_chains(num_chains, num_hops, is_icl=False):
    for i in range(num_chains):
        this_chain = [f"SET {this_vars[0]} = {np.random.randint(10000, 99999)}"]
        for j in range(num_hops):
            this_chain.append(f"SET {this_vars[j+1]} = SET {this_vars[j]} ")
logger.info(f'Length {length} of {most}')
"""
_QA = 'DOCUMENT_PROMPT = "Paper {i}:\\n{document}"\n'


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QEVICT_BENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "RULER" / "scripts" / "data" / "synthetic"
    (folder / "json").mkdir(parents=True)
    files = {"constants.py": _CONSTANTS, "niah.py": _NIAH, "variable_tracking.py": _VT, "qa.py": _QA}
    for name, text in files.items():
        (folder / name).write_text(text)
    essay = " ".join(f"Essay sentence number {i} has\n a few   words." for i in range(3000))
    (folder / "json" / "PaulGrahamEssays.json").write_text(json.dumps({"text": essay}))
    paragraphs = [
        {
            "context": f"Item {i} costs p{i}. It is for sale.",
            "qas": [{"question": f"Price {i}?", "answers": [{"text": f"p{i}"}]}],
        }
        for i in range(300)
    ]
    (folder / "json" / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    settings = [
        {
            "question": f"Which {i}?",
            "answer": f"w{i}",
            "context": [[f"T{i}-{j}", [f"Line of w{i}.", " Another line."]] for j in range(10)],
            "supporting_facts": [[f"T{i}-2", 0]],
        }
        for i in range(60)
    ]
    (folder / "json" / "hotpotqa.json").write_text(json.dumps(settings))
    return tmp_path / "RULER"


def _made(checkout: Path, subset: str, limit: int = 2, length: int = 3000, **fields: Any) -> Any:
    task = Ruler(context_length=length, subsets=(subset,), source="ruler_repo", ruler_dir=str(checkout), **fields)
    return list(task.examples(_MERGES, limit, 0, "test"))


def test_every_subset_is_filled_with_the_wording_of_the_checkout(checkout: Path) -> None:
    task = Ruler(context_length=3000, source="ruler_repo", ruler_dir=str(checkout))
    examples = list(task.examples(_MERGES, 2, 0, "test"))
    assert [example.subset for example in examples] == [subset for subset in SUBSETS for _ in range(2)]
    for example in examples:
        total = _MERGES.count(example) + example.max_new_tokens
        assert 0.9 * 3000 <= total <= 3000
        assert example.max_new_tokens == OFFICIAL_NEW_TOKENS[example.subset]
        assert all(answer in example.context for answer in example.answers)
        assert "{" not in example.context + example.question + example.answer_prefix
        assert example.answer_prefix.startswith(" ")
    assert (task.prompt_source, task.stop, task.splits) == ("redrawn", (), ("test", "dev"))


@pytest.mark.parametrize("subset", NIAH)
def test_needles_of_the_checkout(checkout: Path, subset: str) -> None:
    for example in _made(checkout, subset):
        kind = NIAH[subset].value_type
        plural = NIAH[subset].values * NIAH[subset].queries > 1
        named = kind if plural else kind[:-1]
        word, verb = ("Some", "are") if plural else ("A", "is")
        assert example.context.startswith(f"{word} secret {named} {verb} below.\n")
        assert example.question.startswith(f"What {verb}{' all' * plural} the secret {named} of ")
        assert example.answer_prefix.endswith(f" {verb}")
        found = re.findall(rf"One secret {kind} of (\S+) is: (\S+)\.", example.context)
        asked = re.search(r" of (.*)\?", example.question)
        assert asked is not None
        keys = re.split(r", and |, ", asked[1])
        assert len(keys) == NIAH[subset].queries
        assert sorted(example.answers) == sorted(value for key, value in found if key in keys)
        if subset == "niah_single_1":
            assert set(example.context.split("\n")[1:-1]) - {"Grey noise. More noise."} == {
                f"One secret numbers of {keys[0]} is: {example.answers[0]}."
            }
        if subset == "niah_single_2":
            assert "Essay sentence number 0 has a few words." in example.context


def test_chain_counts_and_documents_of_the_checkout(checkout: Path) -> None:
    (vt,) = _made(checkout, "vt", 1)
    lines = re.findall(r"^SET (\w{5}) = (?:SET )?(\w+) ?$", vt.context, re.MULTILINE)
    assert [name for name, _ in lines] == list(vt.answers)
    assert vt.question == f"Question: Which names have {lines[0][1]}?"
    assert vt.answer_prefix == f" Answer: 5 names have {lines[0][1]}: "
    assert vt.context.startswith("Follow the names.\n\n")
    assert re.search(r"names have \d{5}\? Answer: 5 names have \d{5}:  (\w{3} ){4}\w{3}\n\nFollow", vt.context)
    (cwe,) = _made(checkout, "cwe", 1)
    assert re.search(r"Which 10 words\? Answer: the words: 1\. \w+ 2\. .* 10\. \w+\nA list\.\n1\. ", cwe.context)
    (fwe,) = _made(checkout, "fwe", 1)
    assert fwe.context.startswith("Coded. ")
    (qa,) = _made(checkout, "qa_1", 1)
    assert qa.context.startswith("Answer it.\n\nPaper 1:\nItem ")
    assert (qa.question, qa.answer_prefix, qa.data_source) == ("Answer it.\n\nQuestion: Price 0?", " Answer:", "squad")
    (hotpot,) = _made(checkout, "qa_2", 1)
    assert "Paper 1:\nT" in hotpot.context
    assert hotpot.data_source == "hotpotqa"


def test_other_wording_is_other_data(checkout: Path) -> None:
    def fingerprint(subset: str) -> str:
        return Ruler(subsets=(subset,), source="ruler_repo", ruler_dir=str(checkout)).fingerprint()

    before = {subset: fingerprint(subset) for subset in ("niah_single_2", "qa_1", "vt")}
    assert before == {subset: fingerprint(subset) for subset in before}
    assert Ruler(subsets=("vt",)).fingerprint() != before["vt"]
    constants = checkout / "scripts" / "data" / "synthetic" / "constants.py"
    constants.write_text(_CONSTANTS.replace("Follow the names", "Trace the names"))
    assert fingerprint("vt") != before["vt"]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("constants.py", None, "constants.py does not exist; set task.ruler_dir to a checkout"),
        ("constants.py", "TASKS = {", "constants.py does not hold Python code"),
        ("constants.py", "TASKS = make()", "constants.py does not hold TASKS"),
        ("constants.py", "OTHER = 1", "constants.py does not hold TASKS"),
        ("constants.py", _CONSTANTS.replace("Coded. {context}", "Coded."), r"does not have \{context\} once"),
        ("constants.py", _CONSTANTS.replace("{query}?", "{querry}?"), "constants.py does not hold .*KeyError"),
        (
            "constants.py",
            _CONSTANTS.replace("A list.", "A {list."),
            "constants.py does not hold a text that can be filled",
        ),
        (
            "constants.py",
            _CONSTANTS.replace("'tokens_to_generate': 30", "'tokens_to_generate': 0"),
            "tokens to generate",
        ),
        ("niah.py", "needle = 3", "niah.py does not hold needle"),
        ("niah.py", _NIAH.replace("{value}", "it"), r"niah.py does not hold \{value\} in"),
        ("niah.py", _NIAH.replace("{key}", "{adj}"), "niah.py does not hold a text that can be filled in .*adj"),
        ("niah.py", _NIAH.replace('"Grey noise. More noise."', '" "'), "niah.py does not hold"),
        ("json/PaulGrahamEssays.json", '{"text": " "}', "PaulGrahamEssays.json is missing or damaged"),
        ("variable_tracking.py", "x = 1", "variable_tracking.py does not hold the two lines of a chain"),
        ("qa.py", "", "qa.py does not hold DOCUMENT_PROMPT"),
        ("json/PaulGrahamEssays.json", None, "PaulGrahamEssays.json is missing or damaged; run download_paulgraham"),
        ("json/squad.json", None, "no data of qa_1"),
    ],
)
def test_a_checkout_of_another_form_is_named(checkout: Path, file: str, text: str | None, message: str) -> None:
    path = checkout / "scripts" / "data" / "synthetic" / file
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Ruler(source="ruler_repo", ruler_dir=str(checkout)).fingerprint()


def test_the_lines_of_a_chain_are_told_apart_by_what_they_say(checkout: Path) -> None:
    path = checkout / "scripts" / "data" / "synthetic" / "variable_tracking.py"
    path.write_text("""
chain.append(f"SET {new} = SET {old} ")
if True:
    for i in range(3):
        chain = [f"SET {name} = {number}"]
""")
    (vt,) = _made(checkout, "vt", 1)
    lines = re.findall(r"^SET (\w{5}) = (?:SET )?(\w+) ?$", vt.context, re.MULTILINE)
    assert lines[0][1].isdigit()
    assert [name for name, _ in lines] == list(vt.answers)


def _rows(subset: str, count: int, length: int = 60) -> list[dict[str, Any]]:
    return [
        {
            "context": f"{subset} {i} holds v{i}. " + "Text. " * length,
            "question": f"What does {i} hold?",
            "answer_prefix": " It holds",
            "answer": [f"v{i}"],
            "task": subset,
            "max_new_tokens": 16,
        }
        for i in range(count)
    ]


def _write_hub(folder: Path, files: dict[str, tuple[str, list[dict[str, Any]]]]) -> None:
    """`files`: configuration -> (split, rows)."""
    hub_sets.write(folder, {name: {split: rows} for name, (split, rows) in files.items()})


@pytest.fixture
def hub_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    hub_sets.no_network(monkeypatch, tmp_path)
    return tmp_path / "set"


def _hub(folder: Path, *subsets: str, length: int = 4096) -> Ruler:
    return Ruler(context_length=length, subsets=subsets, source="hub", hub_id=str(folder))


def test_a_set_with_one_configuration_per_length(hub_set: Path) -> None:
    _write_hub(
        hub_set, {"4096": ("test", _rows("vt", 4) + _rows("niah_single_1", 3)), "8192": ("test", _rows("vt", 1))}
    )
    task = _hub(hub_set, "niah_single_1", "vt")
    examples = list(task.examples(_MERGES, 2, 0, "test"))
    assert [example.id for example in examples] == ["niah_single_1-0000", "niah_single_1-0001", "vt-0000", "vt-0001"]
    first = examples[0]
    assert first.context.startswith("niah_single_1 0 holds v0.")
    assert (first.question, first.answer_prefix, first.answers) == ("What does 0 hold?", " It holds", ("v0",))
    assert (first.max_new_tokens, first.data_source) == (16, str(hub_set))
    assert [first.context[a:b] for a, b in first.answer_spans] == ["v0"]
    assert (task.prompt_source, task.stop, task.splits, task.nominal_length) == ("official", (), ("test",), 4096)


def test_a_set_with_one_configuration_per_subset(hub_set: Path) -> None:
    _write_hub(hub_set, {"vt": ("vt", _rows("vt", 2)), "qa_1": ("qa_1", _rows("qa_1", 5))})
    examples = list(_hub(hub_set, "qa_1", "vt", length=32_768).examples(_MERGES, 9, 0, "test"))
    assert [example.subset for example in examples] == ["qa_1"] * 5 + ["vt"] * 2


def test_the_fingerprint_follows_the_rows(hub_set: Path, tmp_path: Path) -> None:
    rows = _rows("vt", 3)
    _write_hub(hub_set, {"4096": ("test", rows)})
    before = _hub(hub_set, "vt").fingerprint()
    _write_hub(tmp_path / "copy", {"4096": ("test", rows)})
    assert _hub(tmp_path / "copy", "vt").fingerprint() == before
    rows[2]["answer"] = ["other"]
    _write_hub(tmp_path / "changed", {"4096": ("test", rows)})
    assert _hub(tmp_path / "changed", "vt").fingerprint() != before


@pytest.mark.usefixtures("hub_set")
def test_without_a_network_the_message_holds_the_command() -> None:
    command = "`hf download simonjegou/ruler --repo-type dataset --local-dir DIR`"
    for hub_id in ("simonjegou/ruler", "/nowhere/at/all"):
        with pytest.raises(ValueError, match=f"^hub_id='{hub_id}' is no folder here.*{command}.*task.hub_id=DIR$"):
            _hub(Path(hub_id), "vt").fingerprint()


def test_mistaken_sets_are_named(hub_set: Path, tmp_path: Path) -> None:
    _write_hub(hub_set, {"4096": ("test", _rows("vt", 2))})
    with pytest.raises(ValueError, match="has no vt at context_length=8192; its configurations: 4096"):
        _hub(hub_set, "vt", length=8192).fingerprint()
    with pytest.raises(ValueError, match=r"has no row of cwe; take it out of task\.subsets"):
        _hub(hub_set, "cwe").fingerprint()
    _write_hub(tmp_path / "train", {"4096": ("train", _rows("vt", 2))})
    with pytest.raises(ValueError, match="hub_id='.*', 4096 has no split test, only train"):
        _hub(tmp_path / "train", "vt").fingerprint()
    rows = [{**row, "answer": "v"} for row in _rows("vt", 2)]
    _write_hub(tmp_path / "bad", {"4096": ("test", rows)})
    with pytest.raises(ValueError, match="vt, row 0: answer is 'v'; it must be a non-empty list"):
        list(_hub(tmp_path / "bad", "vt").examples(_MERGES, 1, 0, "test"))
    for number, (column, value, message) in enumerate(
        [("answer", [""], "blank"), ("max_new_tokens", 0, "positive integer"), ("question", None, "must be text")]
    ):
        folder = tmp_path / f"bad{number}"
        _write_hub(folder, {"4096": ("test", [{**row, column: value} for row in _rows("vt", 2)])})
        with pytest.raises(ValueError, match=f"vt, row 0: {column} is .*{message}"):
            list(_hub(folder, "vt").examples(_MERGES, 1, 0, "test"))
    _write_hub(tmp_path / "bare", {"4096": ("test", [{k: v for k, v in row.items() if k != "task"} for row in rows])})
    with pytest.raises(ValueError, match="has no column task"):
        _hub(tmp_path / "bare", "vt").fingerprint()


def test_prompts_that_share_documents_are_one_group(tmp_path: Path) -> None:
    def row(documents: list[int], question: str) -> str:
        text = "\n\n".join(f"Document {n}:\nText of {d}." for n, d in enumerate(documents, 1))
        whole = f"Answer it.\n\n{text}\n\nAnswer it.\n\nQuestion: {question}"
        return json.dumps({"input": whole, "outputs": ["a"], "answer_prefix": " Answer:", "length": 77})

    lines = [row([1, 2, 3, 4], "Q1?"), row([9, 8, 7, 6], "Q2?"), row([4, 2, 5, 1], "Q3?"), row([1, 6, 20, 21], "Q4?")]
    (tmp_path / "qa_1.jsonl").write_text("\n".join(lines) + "\n")
    task = Ruler(subsets=("qa_1",), source="local", data_dir=str(tmp_path))
    groups = [example.group for example in task.examples(_MERGES, 9, 0, "test")]
    assert groups == ["documents-0", "documents-1", "documents-0", "documents-2"]
    assert task.nominal_length == 77
