"""What one run shows when it is watched from outside: logits, attention masses, scores, codes and bytes.

Shapes: H KV heads, G query heads per KV head, P probed rows, U units, C ledger columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from qevict_bench.dense import DenseRun
from qevict_bench.models import LoadedModel
from qevict_bench.policy import Allowance, KVPolicy, LayerView, Placement
from qevict_bench.rope import Rope
from qevict_bench.session import KVSession
from qevict_bench.store import LayerStore

FOREIGN = (nn.Module, Rope, LoadedModel, torch.Generator, type, str, bytes)
"""What a session refers to but does not hold for its rows."""


class Mass(NamedTuple):
    """Attention mass as handed to a policy: layer, absolute rows [P], units [H or 1, U], mass [H, G, P, U]."""

    layer_idx: int
    rows_P: Tensor
    pos_HU: Tensor
    end_HU: Tensor
    mass_HGPU: Tensor


class Spy:
    """A policy that reports what it is shown, and whether scores have changed since it last saw them."""

    def __init__(self, policy: KVPolicy) -> None:
        self.policy = policy
        self.masses: list[Mass] = []
        self.moved_scores = 0
        self._left: dict[int, tuple[Tensor, Tensor]] = {}  # per layer: positions [H or 1, U], columns [C, H or 1, U]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        self._enter(view)
        self.masses.append(Mass(view.layer_idx, rows_BP[0], view.pos_BHU[0], view.end_BHU[0], mass_BHGPU[0]))
        self.policy.observe(view, mass_BHGPU, rows_BP)
        self._leave(view)

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        for view in views:
            self._enter(view)
        placements = self.policy.place(views, allowance)
        for view in views:
            self._leave(view)
        return placements

    def _leave(self, view: LayerView) -> None:
        if view.columns:
            columns = torch.stack([column[0] for column in view.columns.values()])
            self._left[view.layer_idx] = (view.pos_BHU[0], columns)

    def _enter(self, view: LayerView) -> None:
        """Every unit must have the scores it was left with; a new one has zeros."""
        if not view.columns:
            return
        columns = torch.stack([column[0] for column in view.columns.values()])
        old_pos, old_columns = self._left.get(view.layer_idx, (view.pos_BHU[0, :, :0], columns[..., :0]))
        for head, pos_U in enumerate(view.pos_BHU[0]):
            known = old_pos[head] >= 0
            before_U, scores_CU = old_pos[head][known].contiguous(), old_columns[:, head, known]
            pos_U = pos_U[pos_U >= 0].contiguous()
            expected = columns.new_zeros((len(columns), len(pos_U)))
            if len(before_U):
                at = torch.searchsorted(before_U, pos_U).clamp(max=len(before_U) - 1)
                expected = torch.where(before_U[at] == pos_U, scores_CU[:, at], expected)
            self.moved_scores += int((columns[:, head, : len(pos_U)] != expected).sum())


class Witness:
    """Watches a session of one row, from before its prompt. Call `after` with every step's tokens and logits [V].

    Figures are those of the worst step so far. `mass_gap` is between the attention masses that the policy was handed
    and the dense run's; `byte_error` between allocated and accounted bytes, relative; `used_fraction` bytes over
    allowance, or over FullKV where nothing bounds them.
    """

    def __init__(self, session: KVSession, num_tokens: int) -> None:
        self.session, self.dense, self.spy = session, DenseRun(session.loaded, num_tokens), Spy(session.policy)
        self.before = storages(session)  # calibrated tables and the like; held so that no address is used again
        session.policy = cast(KVPolicy, self.spy)
        for layer in session.layers.values():
            layer.policy = session.policy
        self.logit_gap = self.mass_gap = self.byte_error = self.used_fraction = 0.0
        self.masses_seen = self.changed_codes = self.old_codes = 0
        self._codes: dict[tuple[Any, ...], bytes] = {}
        self._events = 0

    def after(self, ids: Sequence[int], logits_V: Tensor) -> None:
        session = self.session
        self.logit_gap = max(self.logit_gap, float((logits_V - self.dense.step(ids)).abs().max()))
        self._compare_masses()
        if session.trace[0].events > self._events:
            self._events = session.trace[0].events
            self.dense.follow(session)
            self._compare_codes()
        self._weigh()

    def _compare_masses(self) -> None:
        for layer, rows_P, pos_HU, end_HU, mass_HGPU in self.spy.masses:
            gap = (self.dense.mass(layer, rows_P, pos_HU, end_HU) - mass_HGPU).abs().max()
            self.mass_gap = max(self.mass_gap, float(gap))
            self.masses_seen += 1
        self.spy.masses = []

    def _compare_codes(self) -> None:
        codes = {key: code for layer in self.session.layers.values() for key, code in _codes(layer)}
        old = codes.keys() & self._codes.keys()
        self.old_codes += len(old)
        self.changed_codes += sum(codes[key] != self._codes[key] for key in old)
        self._codes = codes

    def _weigh(self) -> None:
        session, usage = self.session, self.session.usage(0)
        allocated = sum(x.nbytes() for at, x in storages(session).items() if at not in self.before)
        accounted = usage.total + usage.host + usage.workspace + usage.sliding
        self.byte_error = max(self.byte_error, abs(allocated - accounted) / accounted)
        seen, prompt_len = session.seq_len[0], session.prompt_len[0]
        allowed = session.budget.allowed_bytes(session.geometry, prompt_len, seen, session.max_new)
        if allowed is None or (session.budget.enforce == "prefill" and seen > prompt_len):
            allowed = session.geometry.full_bytes(seen)
        used = usage.payload if session.budget.everything else usage.total
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


def storages(session: KVSession) -> dict[int, torch.UntypedStorage]:
    """Every storage that can be reached from a session, by address: whatever its rows hold, listed or not."""
    found: dict[int, torch.UntypedStorage] = {}
    done: set[int] = set()
    waiting: list[Any] = [value for name, value in vars(session).items() if name != "_probe"]
    while waiting:
        thing = waiting.pop()
        if id(thing) in done or isinstance(thing, FOREIGN):
            continue
        done.add(id(thing))
        if isinstance(thing, Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage()
        elif isinstance(thing, Mapping):
            waiting += thing.values()
        elif isinstance(thing, list | tuple | set | frozenset):
            waiting += thing
        elif isinstance(thing, Spy):
            waiting.append(thing.policy)
        elif hasattr(thing, "__dict__") and not callable(thing):
            waiting += vars(thing).values()
    return {at: storage for at, storage in found.items() if storage.nbytes()}
