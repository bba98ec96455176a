"""From a subtask's name to drafts of its examples: which family makes it, in which wording, from which questions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from random import Random

from tasks.ruler import articles, chains, checkout, corpora, counts, needles, questions
from tasks.ruler.fit import Draft
from tasks.ruler.own import OwnWording
from tasks.ruler.repo import RepoWording, essays
from tasks.ruler.structure import ESSAY, MATCH_PART, NIAH


class Generator:
    """Makes examples in the wording of the checkout `ruler_dir` ("" = own), with questions from files of `qa_data_dir`
    ("" = those of the checkout, or generated articles).
    """

    def __init__(self, context_length: int, ruler_dir: str, qa_data_dir: str) -> None:
        self._context_length = context_length
        self._checkout = checkout.read(ruler_dir) if ruler_dir else None
        self._wording = RepoWording(self._checkout) if self._checkout else OwnWording()
        self._qa_folder = qa_data_dir or (str(self._checkout.folder / "json") if self._checkout else "")

    def data_hash(self, subset: str) -> str:
        """Hash of the files behind a subset, "" if there are none."""
        text = self._checkout.fingerprint() if self._checkout else ""
        if self._checkout and subset in NIAH and NIAH[subset].haystack == ESSAY:
            text += hashlib.sha256(" ".join(essays(self._checkout.folder)).encode()).hexdigest()
        if subset in MATCH_PART and self._qa_folder:
            text += corpora.read(self._qa_folder, subset).digest
        return text

    def drafts(self, subset: str, limit: int, seed: int, split: str) -> Iterator[Draft]:
        """Yield at most `limit` drafts; draft i depends neither on `limit` nor on other subsets."""
        if subset in MATCH_PART and self._qa_folder:
            limit = min(limit, len(corpora.read(self._qa_folder, subset).part(split)))
        for index in range(limit):
            seeded = f"{seed}/{split}/{subset}/{index}/{self._context_length}"
            rng = Random(int.from_bytes(hashlib.sha256(seeded.encode()).digest()[:8], "big"))
            yield self.draft(subset, f"{subset}-{index:04d}", split, rng, index)

    def draft(self, subset: str, name: str, split: str, rng: Random, index: int = 0) -> Draft:
        """Draw all of one example but the size of its haystack; `index` counts questions of files."""
        if subset in NIAH:
            return needles.draft(subset, name, split, rng, self._wording)
        if subset == "vt":
            return chains.draft(name, self._context_length, rng, self._wording)
        if subset == "cwe":
            return counts.common_words(name, self._context_length, split, rng, self._wording)
        if subset == "fwe":
            return counts.coded_words(name, self._context_length, rng, self._wording)
        if self._qa_folder:
            corpus = corpora.read(self._qa_folder, subset)
            question = corpus.question(corpus.part(split)[index], rng)
        else:
            question = articles.question(subset, split, rng)
        return questions.draft(subset, name, question, rng, self._wording)
