"""cwe and fwe: find the most frequent words, in a numbered list of English words or in a text of invented ones."""

from __future__ import annotations

from itertools import islice
from math import pi
from random import Random
from string import ascii_lowercase

from tasks.ruler import draws
from tasks.ruler.fit import Body, Draft
from tasks.ruler.structure import FWE_ALPHA, FWE_ANSWERS, FWE_LETTERS, repeats
from tasks.ruler.wording import Wording

_ZETA = pi**2 / 6  # zeta(FWE_ALPHA)
_FEWEST_DISTINCT = 80  # words from which on the counts of ranks 2 to 5 differ: N (1/16 - 1/25) / zeta(2) > 1


def common_words(name: str, context_length: int, split: str, rng: Random, wording: Wording) -> Draft:
    """cwe. A unit of the haystack is one uncommon word, as often as it is repeated."""
    spec = repeats(context_length)
    stream = draws.list_words(split, rng)
    shot_words = list(islice(stream, spec.shot_words))
    common = list(islice(stream, spec.answers))
    uncommon: list[str] = []
    salt = rng.getrandbits(64)

    def listed(words: list[str], others: list[str], often: int, seldom: int) -> str:
        items = words * often + others * seldom
        Random(f"{salt}/{len(items)}").shuffle(items)
        return " ".join(f"{number}. {word}" for number, word in enumerate(items, start=1))

    def body(num_units: int) -> Body:
        uncommon.extend(islice(stream, max(0, num_units - len(uncommon))))
        return Body(listed(common, uncommon[:num_units], spec.common, spec.uncommon))

    frame = wording.cwe(spec.answers)
    frequent, rare = shot_words[: spec.answers], shot_words[spec.answers :]
    solved = listed(frequent, rare, spec.shot_common, spec.shot_uncommon)
    answer = " ".join(f"{number}. {word}" for number, word in enumerate(frequent, start=1))
    return Draft(
        id=name,
        subset="cwe",
        frame=frame,
        answers=tuple(common),
        max_new_tokens=wording.new_tokens("cwe"),
        body=body,
        shot=f"{frame.before}{solved}{frame.after}{frame.question}{frame.answer_prefix} {answer}\n",
    )


def coded_words(name: str, context_length: int, rng: Random, wording: Wording) -> Draft:
    """fwe. A unit of the haystack is one word of the text before counts are rounded down."""
    new_tokens = wording.new_tokens("fwe")
    vocabulary: dict[str, None] = {}
    while len(vocabulary) < (context_length - new_tokens) // 50:
        vocabulary["".join(rng.choices(ascii_lowercase, k=FWE_LETTERS))] = None
    words = [wording.noise_word, *list(vocabulary)[1:]]
    salt = rng.getrandbits(64)

    def body(num_units: int) -> Body:
        counts = [int(num_units * rank**-FWE_ALPHA / _ZETA) for rank in range(1, len(words) + 1)]
        items = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
        Random(f"{salt}/{num_units}").shuffle(items)
        return Body(" ".join(items))

    return Draft(
        id=name,
        subset="fwe",
        frame=wording.fwe(),
        answers=tuple(words[1 : 1 + FWE_ANSWERS]),
        max_new_tokens=new_tokens,
        body=body,
        min_units=_FEWEST_DISTINCT,
    )
