"""Several questions about one context: protocol multi_query.

The context is compressed before any question is known. With mode=reset every question sees a copy of that cache, as if
it were the only one; with mode=continue questions and answers stay in the cache, which goes on growing and routing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from qevict_bench.budget import Budget
from qevict_bench.engine import Asked, Generation, answer, check_length, read
from qevict_bench.models import LoadedModel
from qevict_bench.policy import KVPolicy
from qevict_bench.protocol import Protocol, Steps, Turn, lengths
from qevict_bench.session import KVSession, geometry_of


def converse(
    loaded: LoadedModel,
    policy: KVPolicy,
    budget: Budget,
    conversations: Sequence[Sequence[Turn]],
    *,
    stop: tuple[str, ...],
    min_new_tokens: int = 0,
    protocol: Protocol,
    seed: int,
    names: Sequence[str],
    prefill_chunk: int = 1024,
) -> list[list[Generation]]:
    """Answers of all turns of every conversation; the turns of one share their context. Errors as in `generate`.

    A turn's `ttft_s` includes the reading of the context where the turn begins with it.
    """
    policy.admit(budget)
    policy, geometry = policy.prepare(loaded.name, loaded.fingerprint), geometry_of(loaded)
    growing = protocol.mode == "continue"
    contexts, batches = [_common_context(turns) for turns in conversations], dict[tuple[KVPolicy, int], list[int]]()
    longest = []
    for i, (turns, name) in enumerate(zip(conversations, names, strict=True)):
        first, later = len(contexts[i]), _later(turns, len(contexts[i]), growing)
        check_length(loaded, name, first + later, 0)
        longest.append(later)
        fitted = policy.fit(budget, geometry, first, later)
        batches.setdefault((fitted, i if growing and policy.recompresses else 0), []).append(i)
    done: dict[int, list[Generation]] = {}
    for (fitted, _), members in batches.items():
        begin = time.perf_counter()
        session = KVSession(
            loaded,
            fitted,
            budget,
            len(members),
            max_new=[longest[i] for i in members],
            seeds=[f"{seed}/{names[i]}" for i in members],
        )
        session.prefill([contexts[i] for i in members], prefill_chunk)
        asked = [conversations[i] for i in members]
        asking = _Asking(
            session, asked, [len(contexts[i]) for i in members], protocol, stop, min_new_tokens, prefill_chunk
        )
        done.update(zip(members, asking.answers(begin), strict=True))
    return [done[i] for i in range(len(conversations))]


def _common_context(turns: Sequence[Turn]) -> tuple[int, ...]:
    """The ids with which all prompts begin, at most their contexts: where a token straddles the end they may differ."""
    shortest = min((turn.prompt.ids[: turn.prompt.context_tokens] for turn in turns), key=len)
    same = takewhile(lambda ids: len(set(ids)) == 1, zip(shortest, *(turn.prompt.ids for turn in turns), strict=False))
    context = tuple(ids[0] for ids in same)
    if not context:
        raise ValueError("nothing stands before the questions, as protocol=multi_query needs; use query_aware")
    return context


def _later(turns: Sequence[Turn], context: int, growing: bool) -> int:
    """The most tokens that enter the cache after the context."""
    alone = [lengths((turn.prompt.ids[:context], turn.prompt.ids[context:]), turn.max_new)[1] for turn in turns]
    if not growing:
        return max(alone)
    return alone[0] + sum(len(turn.follow_up.ids) + turn.max_new for turn in turns[1:])


@dataclass(frozen=True)
class _Asking:
    """A session that has read the contexts (token counts) of some conversations, one a row, and what they ask."""

    session: KVSession
    conversations: Sequence[Sequence[Turn]]
    contexts: Sequence[int]
    protocol: Protocol
    stop: tuple[str, ...]
    min_new: int
    chunk: int

    def answers(self, begin: float) -> list[list[Generation]]:
        """Question by question: on the growing caches, where a row that has answered waits for the others, or on
        copies.
        """
        made: list[list[Generation]] = [[] for _ in self.conversations]
        growing, spent = self.protocol.mode == "continue", time.perf_counter() - begin
        for index in range(max(map(len, self.conversations))):
            asked = [row for row, turns in enumerate(self.conversations) if index < len(turns)]
            steps = {row: self._steps(row, index, made[row] if growing else []) for row in asked}
            for num in sorted({len(each) for each in steps.values()}):  # a session feeds all rows as many steps
                rows = [row for row, each in steps.items() if len(each) == num]
                session = self.session if growing else self.session.fork()
                begin = time.perf_counter() - (0 if growing and index else spent)
                if growing and index:
                    session.next_turn(rows)
                session.active = list(rows)
                fed = [steps[row] if row in rows else () for row in range(len(self.conversations))]
                logits = read(session, fed, self.protocol.first_token, self.chunk, later=True)
                turns = {row: self.conversations[row][index] for row in rows}
                limits = {row: Asked(turn.prompt, turn.max_new) for row, turn in turns.items()}
                generations = answer(session, logits, limits, self.stop, self.min_new, begin)
                for row, generation in zip(rows, generations, strict=True):
                    made[row].append(generation)
        return made

    def _steps(self, row: int, index: int, before: Sequence[Generation]) -> Steps:
        """What is read for a question after the context, or after the answers before it."""
        turn = self.conversations[row][index]
        if not before:
            return self.protocol.steps(turn.prompt, self.contexts[row])[1:]
        last = before[-1].new_ids[-1:] if before[-1].stop != "eos" else ()  # the newest token is not in the cache yet
        return self.protocol.later_steps(replace(turn.follow_up, ids=(*last, *turn.follow_up.ids)))
