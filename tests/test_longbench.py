"""LongBench: fields, prompts and their cuts, endings, own items, and golden prompts of the embedded models."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from functools import cache
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import spec_of
from small_tokenizers import byte_tokenizer, merging_tokenizer
from test_longbench_metrics import ODD
from transformers import AutoTokenizer

from qevict_bench.asking import Asking, Engine
from qevict_bench.protocol import Protocol
from qevict_bench.task import Ending, Example, Prompter
from tasks.longbench import LongBench, fixture
from tasks.longbench.cut import fitted
from tasks.longbench.structure import BUCKETS, DATASETS, GROUPS, PRESETS

_GOLDEN = Path(__file__).parent / "golden" / "longbench_prompts.json"
_PLAIN = Prompter(merging_tokenizer(chat=False), chat=False)
_CHAT = Prompter(byte_tokenizer(), chat=True)
_ALL = LongBench(preset="all_en")


@cache
def made(limit: int = 4, seed: int = 0, split: str = "test") -> list[Example]:
    return list(_ALL.examples(_PLAIN, limit, seed, split))


# presets and fields


def test_presets() -> None:
    assert [len(PRESETS[name]) for name in ("paper12", "kv16", "all_en", "longbench_e")] == [12, 16, 16, 39]
    groups = (
        "narrativeqa qasper multifieldqa_en|hotpotqa 2wikimqa musique|gov_report qmsum multi_news|trec triviaqa samsum"
    )
    assert LongBench().subsets == tuple(groups.replace("|", " ").split())
    assert {*PRESETS["kv16"]} - {*PRESETS["paper12"]} == {"passage_count", "passage_retrieval_en", "lcc", "repobench-p"}
    in_e = (
        "qasper multifieldqa_en hotpotqa 2wikimqa gov_report multi_news trec triviaqa samsum passage_count "
        "passage_retrieval_en lcc repobench-p"
    )
    assert PRESETS["longbench_e"] == tuple(f"{name}_e/{bucket}" for name in in_e.split() for bucket in BUCKETS)


def test_groups_share_out_all_datasets() -> None:
    assert [name for members in GROUPS.values() for name in members] == list(DATASETS)
    assert [len(members) for members in GROUPS.values()] == [3, 3, 3, 3, 2, 2]


def test_subsets_replace_the_preset_and_a_dataset_of_longbench_e_is_its_three_ranges() -> None:
    assert LongBench(subsets=("trec", "lcc")).subsets == ("trec", "lcc")
    task = LongBench(subsets=("hotpotqa_e", "trec_e/8k+", "trec"), source="local", data_dir="x")
    assert task.subsets == ("hotpotqa_e/0-4k", "hotpotqa_e/4-8k", "hotpotqa_e/8k+", "trec_e/8k+", "trec")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "web"}, "source='web' is unknown; use one of own, local, hub"),
        ({"preset": "kv17"}, "preset='kv17' is unknown; use one of paper12, kv16, all_en, longbench_e"),
        ({"subsets": "trec"}, r"subsets='trec' is a string; write a list: \[trec\]"),
        ({"subsets": ("trec", "lsht")}, "lsht is not valid; choose from narrativeqa, "),
        ({"subsets": ("musique_e",)}, "musique_e is not valid"),
        ({"subsets": ("hotpotqa_e/9k",)}, "hotpotqa_e/9k is not valid"),
        ({"subsets": ("hotpotqa/0-4k",)}, "hotpotqa/0-4k is not valid"),
        ({"subsets": ("trec", "trec")}, "names a subset twice"),
        ({"source": "local"}, "data_dir is empty, but source=local needs it; set task.data_dir"),
        ({"source": "hub"}, "hub_id is empty, but source=hub needs it; set task.hub_id"),
        ({"data_dir": "x"}, "data_dir='x' is not used with source=own; set task.source=local"),
        ({"preset": "longbench_e"}, "source=own has no items of LongBench-E; use source=local or hub"),
        ({"max_length": 1}, "max_length=1 is too small; use 2 or more, or 0"),
        ({"max_length": -5}, "max_length=-5 is too small"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LongBench(**fields)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="limit=0 asks for no example"):
        next(_ALL.examples(_PLAIN, 0, 0, "test"))
    with pytest.raises(ValueError, match="split='train' is not there with source=own; use test or dev"):
        next(_ALL.examples(_PLAIN, 1, 0, "train"))


# own items


def test_own_items_have_the_official_columns_and_an_answer_that_scores_1() -> None:
    columns = {"input", "context", "answers", "length", "dataset", "language", "all_classes", "_id"}
    for dataset in DATASETS:
        assert all(row.keys() == columns for row in islice(fixture.rows(dataset, 0, "test"), 2))
    for example in made():
        for answer in example.answers:
            assert _ALL.score(answer, example) == pytest.approx(1, abs=1e-7), example.id
        assert _ALL.score("", example) == 0
        assert example.gold == "" and example.continuation  # noqa: PT018


def test_own_items_hold_what_answers_them() -> None:
    in_context = {
        "hotpotqa",
        "2wikimqa",
        "musique",
        "narrativeqa",
        "multifieldqa_en",
        "qmsum",
        "gov_report",
        "multi_news",
    }
    for example in made(20):
        if example.subset in in_context:
            pieces = example.answers[0].split(". ") if DATASETS[example.subset].metric == "rouge_l" else example.answers
            assert all(piece.rstrip(".") in example.context for piece in pieces), example.id
        if example.subset == "passage_count":
            texts = [text.partition(": ")[2] for text in example.context.split("\n\n")[1:-1]]
            assert str(len(set(texts))) == example.answers[0]
        if example.subset == "passage_retrieval_en":
            retold = example.question.split(": ")[1].split(".")[0]
            [text] = [text for text in example.context.split("\n\n") if f": {retold}, a" in text]
            assert text.startswith(f"{example.answers[0]}:")
        if example.subset == "qasper":
            found = [answer for answer in example.answers if answer in example.context]
            assert found == list(example.answers) or example.answers == ("unanswerable",)


def test_an_example_depends_on_seed_and_split_but_not_on_limit() -> None:
    few, more = made(2), made(4)
    assert few == [example for example in more if int(example.id[-4:]) < 2]
    texts = [{example.context for example in made(4, *key)} for key in ((0, "test"), (1, "test"), (0, "dev"))]
    assert sum(map(len, texts)) == len(set.union(*texts)) == 3 * 64


def test_any_prediction_gets_a_score() -> None:
    for example in made(1):
        for text in ODD.values():
            assert 0 <= _ALL.score(text, example) <= 1


def test_the_official_metric_is_the_score_and_another_stands_beside_it() -> None:
    names = {example.subset: list(_ALL.metrics("x", example)) for example in made(1)}
    assert names["hotpotqa"] == names["triviaqa"] == ["qa_f1"]
    assert names["gov_report"] == names["samsum"] == ["rouge_l", "rouge_score_l"]
    assert names["trec"] == ["classification"]
    assert names["lcc"] == names["repobench-p"] == ["code_sim", "code_sim_levenshtein"]
    assert (names["passage_count"], names["passage_retrieval_en"]) == (["count"], ["retrieval"])


def test_a_stored_prediction_is_scored_again_without_its_classes() -> None:
    [example] = [example for example in made(1) if example.subset == "trec"]
    stored = dataclasses.replace(example, classes=())
    both = f"{example.answers[0]} or {next(name for name in example.classes if name != example.answers[0])}"
    for text, score in ((example.answers[0], 1.0), (both, 0.5), ("none", 0.0)):
        assert _ALL.score(text, stored) == _ALL.score(text, example) == score


def test_only_the_first_line_of_few_shot_answers_is_scored() -> None:
    for example in made(1):
        score = _ALL.score(f"\n\n{example.answers[0]}\nand so on and on 77", example)
        assert (score > 0.999) == (DATASETS[example.subset].first_line or example.subset in ("lcc", "repobench-p"))


# prompts


def test_the_parts_of_a_prompt() -> None:
    for example in made(2):
        row = next(islice(fixture.rows(example.subset, 0, "test"), int(example.id[-4:]), None))
        assert row["context"] in example.context
        assert example.context[example.instruction_chars :].startswith(row["context"])
        assert example.context.removesuffix("\n").rstrip("\n").endswith(row["context"].rstrip("\n"))
        assert row["input"] in example.question
        assert (example.answer_prefix, example.max_new_tokens) == ("", DATASETS[example.subset].new_tokens)


@pytest.mark.parametrize("prompter", [_CHAT, Prompter(merging_tokenizer(), chat=True), _PLAIN], ids=str)
def test_few_shot_and_code_have_no_chat_template(prompter: Prompter) -> None:
    bare = {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
    for example in made(1):
        prompt = prompter.encode(example)
        text = prompter.tokenizer.decode(prompt.ids)
        plain = example.context + example.question
        begin = "" if example.subset in bare else "<s>"  # these tokenizers put nothing before a text
        if prompter.chat and example.subset not in bare:
            plain = f"<|start|>user\n{plain.strip()}<|end|>\n<|start|>assistant\n"
        assert text == begin + plain
        assert prompter.count(example) == len(prompt.ids)
        assert 0 < prompt.context_tokens < len(prompt.ids)
        for protocol in (Protocol(), Protocol("query_agnostic")):
            assert tuple(token for step in protocol.steps(prompt) for token in step) == prompt.ids


def test_a_bare_prompt_begins_as_the_tokenizer_begins_a_text() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    example = Example("x-0", "x", "ab", "c", "", ("d",), 4, (), chat=False)
    assert tokenizer.decode(Prompter(tokenizer, True).encode(example).ids) == "abc"
    from tokenizers import processors

    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    )
    for chat in (True, False):
        prompter = Prompter(tokenizer, chat)
        assert tokenizer.decode(prompter.encode(example).ids) == "<s>abc"
        assert prompter.count(example) == 4
        whole = dataclasses.replace(example, context="<s>ab")
        assert tokenizer.decode(prompter.encode(whole).ids) == "<s>abc"


def test_follow_up_of_a_bare_prompt() -> None:
    example = Example("x-0", "x", "ab", "c?", "", ("d",), 4, (), chat=False)
    assert _CHAT.tokenizer.decode(_CHAT.follow_up(example).ids) == "\n\nc?"


# cuts


def official_cut(tokenizer: Any, prompt: str, max_length: int) -> str:
    """How pred.py cuts: halves of the ids of the bare prompt, decoded and joined."""
    ids = tokenizer(prompt, truncation=False, return_tensors="pt", verbose=False).input_ids[0]
    if len(ids) <= max_length:
        return prompt
    half = int(max_length / 2)
    ends = ids[:half], ids[-half:]
    return "".join(tokenizer.decode(end, skip_special_tokens=True) for end in ends)


def tokenizer_of(model: str) -> Any:
    spec = spec_of(model)
    try:
        importlib.metadata.distribution(spec.package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"the package {spec.package} is not installed: {spec.install}")
    return AutoTokenizer.from_pretrained(spec.locate()[0])


_ODD_TEXT = "A naïve “quote” 🙂🙂 答案是四十二。 \u2028 x\u0301 tab\tnul\x00 \n\n\n  end ,. 's " * 40


@pytest.mark.parametrize("model", ["smollm2_135m", "gemma3_270m", "merging", "bytes"])
def test_cuts_are_the_official_ones(model: str) -> None:
    small = {"merging": merging_tokenizer, "bytes": byte_tokenizer}
    tokenizer = small[model]() if model in small else tokenizer_of(model)
    odd = [dataclasses.replace(made(1)[0], context=_ODD_TEXT[at:], instruction_chars=0) for at in range(3)]
    for chat in {False, bool(tokenizer.chat_template)}:
        prompter = Prompter(tokenizer, chat)
        for example in [*made(1), *odd]:
            whole = example.context + example.question
            size = len(tokenizer(whole, verbose=False)["input_ids"])
            for max_length in (2, 3, 64, 301, size - 1, size, size + 1):
                found = fitted(example, prompter, max_length)
                assert found.context + found.question == official_cut(tokenizer, whole, max_length)
                cut = 0 if size <= max_length else size - 2 * (max_length // 2)
                assert found.truncated_tokens == cut
                assert (found == example) == (not cut)
                if max_length == 301 and found != example and example.question in official_cut(tokenizer, whole, 301):
                    assert found.question == example.question
                    assert found.context.startswith(example.context[: example.instruction_chars])
                    assert found.instruction_chars == example.instruction_chars
                if cut and max_length > 64:
                    assert prompter.encode(found).truncated_tokens == cut


def test_a_cut_that_goes_through_the_question() -> None:
    prompter = Prompter(byte_tokenizer(), chat=False)
    example = Example("x-0", "x", "In: context. ", "A question that is long.", "", ("d",), 4, (), instruction_chars=4)
    short = fitted(example, prompter, 10)
    assert (short.context, short.question, short.instruction_chars) == ("In: c", "long.", 4)
    lost = fitted(example, prompter, 4)
    assert (lost.context, lost.question, lost.instruction_chars) == ("In", "g.", -1)
    most = fitted(example, prompter, 36)
    assert (most.context, most.question) == ("In: context. ", "A quetion that is long.")


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("make", [byte_tokenizer, merging_tokenizer])
def test_without_max_length_prompts_are_cut_to_what_the_model_takes(make: Any, chat: bool) -> None:
    tokenizer = make()
    for room in (700, 1500):
        prompter = Prompter(tokenizer, chat, max_tokens=room)
        for example in LongBench(subsets=("hotpotqa", "trec", "gov_report")).examples(prompter, 2, 0, "test"):
            prompt = prompter.encode(example)
            total = len(prompt.ids) + example.max_new_tokens
            assert room - 8 <= total <= room
            assert prompt.truncated_tokens > 0
    unbound = Prompter(tokenizer, chat)
    assert not any(x.truncated_tokens for x in LongBench().examples(unbound, 1, 0, "test"))


def test_max_length_does_not_exceed_what_the_model_takes() -> None:
    tokenizer = merging_tokenizer(chat=False)
    unbound, bound = Prompter(tokenizer, False), Prompter(tokenizer, False, max_tokens=700)
    for example in made(1):
        assert fitted(example, bound, 10**6) == fitted(example, bound, 0)
        assert fitted(example, bound, 150) == fitted(example, unbound, 150)
        most = bound.count(fitted(example, bound, 690)) + example.max_new_tokens
        assert most <= 700


def test_a_model_that_not_even_the_template_fits_leaves_prompts_whole() -> None:
    examples = list(
        LongBench(subsets=("hotpotqa",)).examples(Prompter(byte_tokenizer(), True, max_tokens=40), 1, 0, "test")
    )
    assert not examples[0].truncated_tokens


# endings


def test_answers_end_as_official_ones_but_for_own_wording_of_one_line(tmp_path: Path) -> None:
    assert _ALL.ending("samsum") == Ending((), ("\n",), 1)
    assert _ALL.ending("hotpotqa") == _ALL.ending("trec") == _ALL.ending("passage_count") == Ending(("\n",))
    assert _ALL.ending("gov_report") == _ALL.ending("lcc") == Ending()
    worded = LongBench(prompts_dir=str(tmp_path))
    assert worded.ending("hotpotqa") == worded.ending("trec") == Ending()
    assert worded.ending("samsum") == Ending((), ("\n",), 1)


def test_the_last_token_of_an_eos_text_ends_answers_of_its_subset() -> None:
    calls: list[Any] = []

    @dataclasses.dataclass(frozen=True)
    class Loaded:
        tokenizer: Any
        eos_ids: tuple[int, ...]

    def generate(loaded: Any, *_: Any, **options: Any) -> list[Any]:
        calls.append((loaded.eos_ids, options["stop"], options["min_new_tokens"]))
        return []

    tokenizer = byte_tokenizer()
    newline = tokenizer.encode("\n", add_special_tokens=False)[-1]
    engine = Engine(generate, generate, generate, lambda _: None, lambda: None)  # type: ignore[arg-type, return-value]
    asking = Asking(engine, Loaded(tokenizer, (1000,)), SimpleNamespace(seed=0), Protocol(), _ALL)  # type: ignore[arg-type]
    job = SimpleNamespace(policy=None, budget=None, metrics=SimpleNamespace(fidelity=False))
    for subset in ("samsum", "hotpotqa", "gov_report"):
        example = next(example for example in made(1) if example.subset == subset)
        ready = SimpleNamespace(example=example, prompt=None, row=None)
        asking.answers(job, _CHAT, [ready])  # type: ignore[arg-type, list-item]
    assert calls == [((newline, 1000), (), 1), ((1000,), ("\n",), 0), ((1000,), (), 0)]


# golden prompts


@pytest.mark.parametrize("form", ["smollm2_135m chat", "gemma3_270m plain"])
def test_prompts_are_the_golden_ones(form: str, update_golden: bool) -> None:
    """Hash of the token ids of the first example of every dataset, in own wording."""
    model, kind = form.split()
    prompter = Prompter(tokenizer_of(model), kind == "chat")
    found = {
        example.subset: hashlib.sha256(repr(prompter.encode(example).ids).encode()).hexdigest()[:16]
        for example in _ALL.examples(prompter, 1, 0, "test")
    }
    known = json.loads(_GOLDEN.read_text()) if _GOLDEN.is_file() else {}
    if update_golden:
        _GOLDEN.write_text(json.dumps(known | {form: found}, indent=2) + "\n")
    else:
        assert found == known[form]
