"""KVSession: one batch of sequences on a model whose attention reads our store; prefill, append, decode, fork.

Shapes: B rows, Q new tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qevict_bench.accounting import PlacementCost, usage, workspace
from qevict_bench.attention import Step, attend, attend_sliding, observe
from qevict_bench.budget import Budget, BudgetExceeded, Geometry, Usage
from qevict_bench.models import LoadedModel
from qevict_bench.policy import KVPolicy, Placement
from qevict_bench.rope import Rope
from qevict_bench.store import LayerStore
from qevict_bench.trace import RowTrace

GROWTH = 64  # tokens of room where no routing event is due


def geometry_of(loaded: LoadedModel) -> Geometry:
    """Cache geometry of a loaded model."""
    config, layers = loaded.model.config, loaded.compressible_layers
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    sliding = loaded.num_layers - len(layers)
    window = int(getattr(config, "sliding_window", 0) or 0) if sliding else 0
    return Geometry(len(layers), kv_heads, heads // kv_heads, head_dim, loaded.model.dtype.itemsize, sliding, window)


class KVSession:
    """Runs `policy` under `budget` for `num_rows` sequences; at most `max_new` tokens (of each row) follow the prefill.

    `seeds` name the rows' random generators. With `working_copy` the decoded low-bit tiers are kept between events
    (reported as workspace); without it they are decoded at every read, with bit-identical results.
    Raises BudgetExceeded when a step ends over budget.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        policy: KVPolicy,
        budget: Budget,
        num_rows: int,
        *,
        max_new: int | Sequence[int] = 0,
        seeds: Sequence[str] = (),
        working_copy: bool = True,
    ) -> None:
        self.loaded, self.policy, self.budget = loaded, policy, budget
        self.max_new = [max_new] * num_rows if isinstance(max_new, int) else list(max_new)
        self.geometry = geometry_of(loaded)
        self.working_copy = working_copy
        self.seq_len, self.prompt_len = [0] * num_rows, [0] * num_rows
        self.active = list(range(num_rows))
        self.trace = [RowTrace() for _ in range(num_rows)]
        names = list(seeds) or [str(row) for row in range(num_rows)]
        self._rngs = [torch.Generator().manual_seed(_seed(name)) for name in names]
        model = loaded.model
        config = model.config
        kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * loaded.num_layers)
        rope = Rope(model.model.rotary_emb, kinds, _rope_types(config))
        like = torch.empty((0, self.geometry.head_dim), dtype=model.dtype, device=model.device)
        self._modules: dict[int, nn.Module] = {}
        self.layers = {
            index: LayerStore(policy, self.geometry, index, rope, like, num_rows, self._rng, self._output_weight(index))
            for index in loaded.compressible_layers
        }
        self._sliding: dict[int, list[tuple[Tensor, Tensor]]] = {
            index: [(like.new_empty((self.geometry.num_kv_heads, 0, like.shape[-1])),) * 2 for _ in range(num_rows)]
            for index in range(loaded.num_layers)
            if index not in self.layers
        }
        self._replay: dict[int, list[tuple[tuple[int, ...], Tensor]]] = {index: [] for index in self.layers}
        self._step = Step("prefill", (), (), ())
        self._probe: tuple[Step, Tensor | None] | None = None
        self._decoded = 0  # tokens since the last prefill or append
        self._room = 0

    # ---- phases ----

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int = 1024) -> Tensor:
        """Run the prompts (token ids per row) in chunks and route once at the end; last-token logits [B, V]."""
        self.prompt_len = [len(prompt) for prompt in prompts]
        for layer in self.layers.values():
            layer.prompt_len = list(self.prompt_len)
        return self._extend("prefill", prompts, chunk)

    @torch.inference_mode()
    def append(self, tokens: Sequence[Sequence[int]], chunk: int = 1024) -> Tensor:
        """Add tokens to every active row (a question) as one step that ends with a routing event; logits [B, V]."""
        return self._extend("append", tokens, chunk)

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int]) -> Tensor:
        """Add one token to every active row (others' entries are ignored); logits [B, V]."""
        grown = self._room == 0
        if grown:
            self._room = GROWTH
            self._reserve([1] * len(self.seq_len), GROWTH - 1)
        ids = torch.tensor(tokens, device=self.loaded.model.device)[:, None]
        logits = self._forward("decode", ids, [1 if row in self.active else 0 for row in range(len(tokens))])
        self._room -= 1
        self._decoded += 1
        every = self.policy.cadence.decode_every
        event = every and self._decoded % every == 0
        if event:
            self._route()
        self._account("decode", measured=bool(event) or grown)
        return logits[:, 0]

    def _rng(self, row: int) -> torch.Generator:
        """The row's generator; a copy while it is frozen, so that nothing is drawn from it."""
        rng = self._rngs[row]
        return rng if row in self.active else torch.Generator().set_state(rng.get_state())

    def freeze(self, row: int) -> None:
        """Stop a row at its EOS: nothing is added to it or moved in it until its next turn."""
        self.active.remove(row)

    def next_turn(self, rows: Sequence[int]) -> None:
        """Go on with rows that a turn of a conversation has frozen; their traces begin anew, without room reserved."""
        self.active = sorted(rows)
        for layer in self.layers.values():
            layer.release()
        for row in rows:
            self.trace[row] = self.trace[row].next_turn()

    def fork(self) -> KVSession:
        """An independent copy that shares only the model: for several questions on one context."""
        shared = (self.loaded, self.policy, self.budget, self.geometry, next(iter(self.layers.values())).rope)
        memo: dict[int, Any] = {id(thing): thing for thing in (*shared, *self._modules.values())}
        memo.update({id(rng): torch.Generator().set_state(rng.get_state()) for rng in self._rngs})
        clone = copy.deepcopy(self, memo)
        for layer in clone.layers.values():
            layer.rng = clone._rng
        return clone

    # ---- one forward pass ----

    def _extend(self, phase: str, tokens: Sequence[Sequence[int]], chunk: int) -> Tensor:
        lens = [len(ids) if row in self.active else 0 for row, ids in enumerate(tokens)]
        if min((lens[row] for row in self.active), default=0) < 1:
            raise ValueError(f"{phase}: every row needs at least one token, got lengths {lens}")
        self._decoded = 0
        self._reserve(lens, 0)
        last: Tensor | None = None
        for begin in range(0, max(lens), chunk):
            new = [max(0, min(chunk, n - begin)) for n in lens]
            width = max(new)
            ids = torch.tensor(
                [[*row[begin : begin + n], *[0] * (width - n)] for row, n in zip(tokens, new, strict=True)]
            )
            ends = sorted({n - 1 for n, whole in zip(new, lens, strict=True) if n and begin + n == whole}) or [0]
            logits = self._forward(phase, ids.to(self.loaded.model.device), new, ends)
            last = logits.new_zeros((len(lens), logits.shape[-1])) if last is None else last
            for row, n in enumerate(new):
                if n and begin + n == lens[row]:
                    last[row] = logits[row, ends.index(n - 1)]
        self._note_peak()
        self._room = 0
        if phase == "append" or self.policy.cadence.prefill:
            self._route()
        self._account(phase, measured=True)
        assert last is not None
        return last

    def _forward(self, phase: str, ids_BQ: Tensor, new: list[int], keep: Sequence[int] = (0,)) -> Tensor:
        rows = tuple(row for row in self.active if new[row])
        self._step = Step(phase, rows, tuple(new), tuple(self.seq_len))
        shift = self._compact_shift() if self.policy.rope == "compact" else [0] * len(new)
        first = torch.tensor([n - s for n, s in zip(self.seq_len, shift, strict=True)], device=ids_BQ.device)
        positions = first[:, None] + torch.arange(ids_BQ.shape[1], device=ids_BQ.device)
        out = self.loaded.model(
            ids_BQ,
            position_ids=positions,
            use_cache=False,
            kv=self,
            logits_to_keep=torch.tensor(list(keep), device=ids_BQ.device),
        )
        for row in rows:
            self.seq_len[row] += new[row]
        logits: Tensor = out.logits
        return logits

    def _compact_shift(self) -> list[int]:
        """How far the next position lies below the number of tokens seen, per row."""
        layer, heads = next(iter(self.layers.values())), self.geometry.num_kv_heads
        return [seen - layer.full.count[row * heads] for row, seen in enumerate(self.seq_len)]

    def attend(
        self, module: nn.Module, q_BHQD: Tensor, k_BHQD: Tensor, v_BHQD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Called by the attention function: store the new tokens, attend, score what the policy probes."""
        index, step = int(module.layer_idx), self._step  # type: ignore[arg-type]
        if index in self._sliding:
            return self._attend_sliding(
                index, q_BHQD, k_BHQD, v_BHQD, scale, int(window or self.geometry.sliding_window)
            )
        self._modules[index] = module
        layer = self.layers[index]
        if step.phase != "decode":  # a question cuts the interval short
            self._score_replayed(layer, scale)
        layer.append(list(step.rows), list(step.new), k_BHQD, v_BHQD)
        slots = layer.read(self.working_copy)
        out = attend(q_BHQD, slots, step, scale)
        if step.phase == "decode" and self.policy.cadence.replay:
            self._replay[index].append((step.rows, q_BHQD))
            if len(self._replay[index]) == self.policy.cadence.decode_every:
                self._score_replayed(layer, scale)
        elif (probed := self._probed(step)) is not None:
            observe(layer, q_BHQD, slots, step, probed, scale)
        return out

    def _score_replayed(self, layer: LayerStore, scale: float) -> None:
        """Score the queries buffered since the last event together; they are the newest tokens of their rows."""
        buffered = self._replay[layer.layer_idx]
        if not buffered:
            return
        self._replay[layer.layer_idx] = []
        new = tuple(sum(row in rows for rows, _ in buffered) for row in range(layer.num_rows))  # some froze meanwhile
        start = tuple(seen - n for seen, n in zip(layer.seq_len, new, strict=True))
        step = Step("decode", tuple(row for row, n in enumerate(new) if n), new, start)
        if (probed := self._probed(step)) is not None:
            queries = torch.cat([q_BHQD for _, q_BHQD in buffered], dim=2)
            observe(layer, queries, layer.read(self.working_copy), step, probed, scale)

    def _probed(self, step: Step) -> Tensor | None:
        """Rows to observe as a mask over the step's tokens [B, Q]; asked once per step, the same for every layer."""
        if self._probe is None or self._probe[0] != step:
            self._probe = (step, self._ask_probe(step))
        return self._probe[1]

    def _ask_probe(self, step: Step) -> Tensor | None:
        width = max(step.new)
        probed = torch.zeros((len(step.new), width), dtype=torch.bool)
        for row in step.rows:
            start, prompt_len = step.start[row], torch.tensor(self.prompt_len[row : row + 1])
            rngs = self._rngs[row : row + 1]
            mask = self.policy.probe(start, start + step.new[row], prompt_len, step.phase, rngs.__getitem__)
            if mask is not None:
                probed[row, : step.new[row]] = mask[0]
        return probed.to(self.loaded.model.device) if bool(probed.any()) else None

    def _attend_sliding(
        self, index: int, q_BHQD: Tensor, k_BHQD: Tensor, v_BHQD: Tensor, scale: float, window: int
    ) -> Tensor:
        out = torch.zeros_like(q_BHQD)
        for row in self._step.rows:
            new = self._step.new[row]
            keys, values = (
                torch.cat((old, x[row, :, :new]), dim=1)
                for old, x in zip(self._sliding[index][row], (k_BHQD, v_BHQD), strict=True)
            )
            out[row, :, :new] = attend_sliding(q_BHQD[row, :, :new], keys, values, window, scale)
            self._sliding[index][row] = (keys[:, -window:].clone(), values[:, -window:].clone())
        return out

    def _output_weight(self, index: int) -> Callable[[], Tensor]:
        return lambda: self._modules[index].get_submodule("o_proj").get_parameter("weight")

    # ---- routing and bytes ----

    def _reserve(self, new: list[int], room: int) -> None:
        for layer in self.layers.values():
            layer.reserve(self.active, new, room)

    def _allowed(self, row: int) -> int | None:
        return self.budget.allowed_bytes(self.geometry, self.prompt_len[row], self.seq_len[row], self.max_new[row])

    def _route(self) -> None:
        """A routing event: ask the policy, carry its placement out."""
        self._room = self.policy.cadence.decode_every
        room = [self._room if row in self.active else 0 for row in range(len(self.seq_len))]
        allowed = [self._allowed(row) for row in range(len(room))]
        layers = list(self.layers.values())
        shift = self._compact_shift()
        frozen = sorted({*range(len(room))} - {*self.active})
        for layer in layers:
            layer.table.cover([seen + n for seen, n in zip(layer.seq_len, room, strict=True)])
        for group in [layers] if self.policy.scope == "model" else [[layer] for layer in layers]:
            share = None if None in allowed else [(n or 0) * len(group) // len(layers) for n in allowed]
            cost = PlacementCost(group, room, share, self.budget.everything)
            views = [layer.view() for layer in group]
            held = [{name: column.clone() for name, column in view.columns.items()} for view in views if frozen]
            placements = self.policy.place(views, cost)
            for view, columns in zip(views, held, strict=False):
                for name, column in columns.items():
                    view.columns[name][frozen] = column[frozen]
            for layer, placement in zip(group, placements, strict=True):
                self._carry_out(layer, placement, room)
        for row in self.active:
            self.trace[row].events += 1
        if self.policy.rope == "compact":
            back = [new - old for new, old in zip(self._compact_shift(), shift, strict=True)]
            self._shift_sliding(back)

    def _shift_sliding(self, back: list[int]) -> None:
        """Positions were re-indexed: the keys of sliding layers, which evict nothing, move along."""
        rope = next(iter(self.layers.values())).rope
        for index, rows in self._sliding.items():
            for row, delta in enumerate(back):
                if delta:
                    keys, values = rows[row]
                    by = torch.full(keys.shape[:2], delta, device=keys.device)
                    rows[row] = (rope.shift(keys, by, index, delta + 1).to(keys.dtype), values)

    def _carry_out(self, layer: LayerStore, placement: Placement, room: list[int]) -> None:
        if len(self.active) < len(room):
            frozen = torch.ones(len(room), dtype=torch.bool, device=layer.device)
            frozen[self.active] = False
            held = layer.view().tier_BHU
            placement = Placement(torch.where(frozen[:, None, None], held, placement.tier_BHU))
        moves = layer.apply(placement, room)
        counts = torch.stack(moves).tolist()
        for row in self.active:
            trace = self.trace[row]
            trace.promotions += counts[0][row]
            trace.demotions += counts[1][row]
            trace.evictions += counts[2][row]
            layer.event_len[row] = layer.seq_len[row]

    def usage(self, row: int) -> Usage:
        """Bytes of one row over all layers, sliding ones apart."""
        total = sum((usage(layer, row) for layer in self.layers.values()), Usage())
        sliding = sum(x.nbytes for rows in self._sliding.values() for x in rows[row])
        return total + Usage(sliding=sliding, workspace=self._replay_bytes(row))

    def _replay_bytes(self, row: int) -> int:
        return sum(x[row].nbytes for buffered in self._replay.values() for _, x in buffered)

    def _workspace(self, row: int) -> int:
        return self._replay_bytes(row) + sum(workspace(layer, row) for layer in self.layers.values())

    def _note_peak(self) -> None:
        for row in self.active:
            held = self.usage(row).total
            self.trace[row].prefill_peak_bytes = max(self.trace[row].prefill_peak_bytes, held)

    def _account(self, phase: str, measured: bool) -> None:
        """Measure after an event or growth, compare with the allowance at every step, keep the trace."""
        for row in self.active:
            trace, seen = self.trace[row], self.seq_len[row]
            if measured:
                trace.usage, trace.measured_at = self.usage(row), seen
            grown = self.geometry.full_bytes(seen - trace.measured_at)
            trace.usage, trace.measured_at = trace.usage.filled(grown), seen
            trace.workspace = max(trace.workspace, self._workspace(row))
            used = trace.usage.payload if self.budget.everything else trace.usage.total
            allowed = self._allowed(row)
            bound = allowed if allowed is not None else 0
            bounded = phase == "prefill" or self.budget.enforce == "always"
            if allowed is not None and used > allowed and bounded:
                self._refuse(phase, row, used, allowed)
            whole = self.geometry.full_bytes(seen)
            if phase == "decode":
                trace.decode.append((used, whole, bound))
            else:
                trace.after_prefill, trace.after_prefill_bytes, trace.after_prefill_allowed = used / whole, used, bound
            sliding = self.geometry.sliding_layers * self.geometry.num_kv_heads * self.geometry.slot_bytes
            all_layers = whole + sliding * min(seen, self.geometry.sliding_window)
            trace.whole_cache = (used + trace.usage.sliding) / all_layers

    def _refuse(self, phase: str, row: int, used: int, allowed: int) -> None:
        parts = ", ".join(f"{name} {size}" for name, size in self.trace[row].usage.counted.items() if size)
        raise BudgetExceeded(
            f"{self.policy.name} holds {used} bytes after {phase} step {self._decoded} (token {self.seq_len[row]}), "
            f"allowed are {allowed} (budget={self.budget.spec}, basis={self.budget.basis}): {parts}"
        )


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def _rope_types(config: Any) -> list[str]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    return [str(value.get("rope_type", "default")) for value in nested]
