"""Several questions about one context: protocol multi_query.

The context is compressed before any question is known. With mode=reset every question sees a copy of that cache, as if
it were the only one; with mode=continue questions and answers stay in the cache, which goes on growing and routing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
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
        batches.setdefault((fitted, i if growing else 0), []).append(i)  # a growing cache keeps its own routing clock
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
        if growing:
            made = [_continued(session, asked[0], len(contexts[members[0]]), protocol, stop, prefill_chunk, begin)]
        else:
            steps = [[protocol.steps(t.prompt, len(contexts[i]))[1:] for t in conversations[i]] for i in members]
            made = _forked(session, asked, steps, protocol, stop, prefill_chunk, begin)
        done.update(zip(members, made, strict=True))
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


def _forked(
    session: KVSession,
    conversations: Sequence[Sequence[Turn]],
    steps: Sequence[Sequence[Steps]],
    protocol: Protocol,
    stop: tuple[str, ...],
    chunk: int,
    begin: float,
) -> list[list[Generation]]:
    """Every question on a copy of the compressed contexts, one row per conversation."""
    made: list[dict[int, Generation]] = [{} for _ in conversations]
    spent, batches = time.perf_counter() - begin, dict[tuple[int, int], list[int]]()
    for row, turns in enumerate(steps):
        for index, turn in enumerate(turns):
            batches.setdefault((index, len(turn)), []).append(row)
    for (index, _), rows in batches.items():
        fork, begin = session.fork(), time.perf_counter() - spent
        fork.active = list(rows)
        fed = [turns[index] if row in rows else () for row, turns in enumerate(steps)]
        logits = read(fork, fed, protocol.first_token, chunk, later=True)
        asked = {row: Asked(conversations[row][index].prompt, conversations[row][index].max_new) for row in rows}
        for row, generation in zip(rows, answer(fork, logits, asked, stop, begin), strict=True):
            made[row][index] = generation
    return [[turns[index] for index in sorted(turns)] for turns in made]


def _continued(
    session: KVSession,
    turns: Sequence[Turn],
    context: int,
    protocol: Protocol,
    stop: tuple[str, ...],
    chunk: int,
    begin: float,
) -> list[Generation]:
    """All questions of the session's one conversation on its growing cache."""
    made: list[Generation] = []
    for index, turn in enumerate(turns):
        if index == 0:
            steps = protocol.steps(turn.prompt, context)[1:]
        else:
            begin = time.perf_counter()
            session.next_turn([0])
            last = made[-1].new_ids[-1:] if made[-1].stop != "eos" else ()  # the newest token is not in the cache yet
            steps = protocol.later_steps(replace(turn.follow_up, ids=(*last, *turn.follow_up.ids)))
        logits = read(session, [steps], protocol.first_token, chunk, later=True)
        made += answer(session, logits, {0: Asked(turn.prompt, turn.max_new)}, stop, begin)
    return made
