"""What one run shows when it is watched from outside: logits, attention masses, scores, codes and bytes.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from qevict_bench.dense import DenseRun
from qevict_bench.holdings import COUNTED, Holdings, billed, holdings, measured
from qevict_bench.policy import KVPolicy
from qevict_bench.restored import worst
from qevict_bench.session import KVSession
from qevict_bench.spy import Spy
from qevict_bench.store import LayerStore

EVERY = 8  # steps without an event between two walks through memory


def known_before(policy: KVPolicy, model: Any) -> Holdings:
    """What can be reached before a session is made: calibrated tables, the model, and what earlier runs left."""
    return holdings(policy, KVSession, model)


class Witness:
    """Watches a session of one row, from before its prompt; `before` is what there was before the session was made.
    Call `after` with every step's tokens and logits [V].

    Figures are those of the worst step so far. `mass_gap` is between the attention masses that the policy was handed
    and the dense run's; `lost_rows` as in Spy; `used_fraction` measured bytes over allowance, or over FullKV where
    nothing bounds them. `misbilled` bytes are the differences between measured and billed components, and `unlisted`
    what was found outside all of them; `loose` is what Python objects grew by; `accounted` the bytes of that step.
    """

    def __init__(self, session: KVSession, num_tokens: int, before: Holdings) -> None:
        self.session, self.dense, self.spy = session, DenseRun(session.loaded, num_tokens), Spy(session.policy)
        self.before = before
        session.policy = cast(KVPolicy, self.spy)
        for layer in session.layers.values():
            layer.policy = session.policy
        self.logit_gap = self.mass_gap = self.used_fraction = 0.0
        self.masses_seen = self.changed_codes = self.old_codes = self.lost_rows = 0
        self.misbilled: dict[str, int] = {}
        self.unlisted = self.loose = self.accounted = 0
        self._codes: dict[tuple[Any, ...], bytes] = {}
        self._events = self._steps = 0

    def after(self, ids: Sequence[int], logits_V: Tensor) -> None:
        session, spy = self.session, self.spy
        self.logit_gap = worst(self.logit_gap, (logits_V - self.dense.step(ids)).abs())
        self._compare_masses()
        event = session.trace[0].events > self._events
        if event:
            self._events = session.trace[0].events
            self.dense.follow(session)
            self._compare_codes()
        if event or not session.policy.cadence.replay:  # else rows wait for the next event
            self.lost_rows = max(self.lost_rows, spy.lost_rows(list(session.layers), session.seq_len[0]))
        if event or self._steps % EVERY == 0:
            self._weigh()
        self._steps += 1

    def _compare_masses(self) -> None:
        for layer, rows_P, pos_HU, end_HU, mass_HGPU in self.spy.masses:
            gap = (self.dense.mass(layer, rows_P, pos_HU, end_HU) - mass_HGPU).abs()
            self.mass_gap = worst(self.mass_gap, gap)
            self.masses_seen += 1
        self.spy.masses = []

    def _compare_codes(self) -> None:
        codes = {key: code for layer in self.session.layers.values() for key, code in _codes(layer)}
        old = codes.keys() & self._codes.keys()
        self.old_codes += len(old)
        self.changed_codes += sum(codes[key] != self._codes[key] for key in old)
        self._codes = codes

    def _weigh(self) -> None:
        session = self.session
        bill = billed(session)
        sizes, unlisted, loose = measured(session, self.spy.policy, self.before)
        self.accounted = sum(bill.values())
        for name in bill:
            off = sizes.get(name, 0) - bill[name]
            if abs(off) > abs(self.misbilled.get(name, 0)):
                self.misbilled[name] = off
        self.unlisted, self.loose = max(self.unlisted, unlisted), max(self.loose, loose)
        seen, prompt_len = session.seq_len[0], session.prompt_len[0]
        allowed = session.budget.allowed_bytes(session.geometry, prompt_len, seen, session.max_new[0])
        if allowed is None or (session.budget.enforce == "prefill" and seen > prompt_len):
            allowed = session.geometry.full_bytes(seen)
        used = session.usage(0).payload if session.budget.everything else sum(sizes.get(name, 0) for name in COUNTED)
        self.used_fraction = max(self.used_fraction, used / allowed)


def _codes(layer: LayerStore) -> Iterator[tuple[tuple[Any, ...], bytes]]:
    """What the codes of every unit of row 0 decode to (fp32, keys before any rotation), with its place as a key.

    Any change of codes, parameters or references that matters shows here, however they are laid out.
    """
    rect = layer.table.rect()
    for name, side in zip(("key", "value"), layer.sides, strict=True):
        for number, lane in enumerate(side.lanes):
            held = layer.per_head(side.lane_map(rect.coded) == number)[0]
            if not bool(held.any()):
                continue
            head = torch.nonzero(held)[:, 0]
            entries = torch.arange(len(head), device=head.device)
            decoded = lane.decode(entries, head, side.reference[number], torch.float32).cpu()
            places = zip(head.tolist(), layer.per_head(rect.pos)[0][held].tolist(), strict=True)
            for place, unit in zip(places, decoded, strict=True):
                yield (layer.layer_idx, name, number, *place), unit.contiguous().numpy().tobytes()
