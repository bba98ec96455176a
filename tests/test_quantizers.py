"""KIVI, KVQuant, ZipCache, MiKV against loops over lists and published figures; codecs, footprints, calibration."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import naive_quantizers as naive
import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import save_file
from script_modules import calibrate, script
from tiny_models import attentions, eager, engine, family, kept, prompt, random_ids
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from methods.full_kv import FullKV
from methods.kivi import KIVI
from methods.kvquant import KVQuant
from methods.mikv import MiKV
from methods.zipcache import ZipCache
from qevict_bench.accounting import PlacementCost, usage
from qevict_bench.budget import Budget, Geometry, Infeasible
from qevict_bench.codecs import PerChannel, PerToken
from qevict_bench.engine import generate
from qevict_bench.models import ModelSpec
from qevict_bench.nuq import Codebooks, NuqKeys, NuqValues, Sparse, longest_unit
from qevict_bench.policy import FULL, KVPolicy
from qevict_bench.rope import Rope
from qevict_bench.runner import make_plan
from qevict_bench.session import KVSession, geometry_of
from qevict_bench.store import LayerStore

NATIVE = Budget("native")
UNIFORM = {bits: tuple(torch.linspace(-1, 1, 1 << bits).tolist()) for bits in (2, 3, 4)}


@cache
def codebooks() -> Codebooks:
    return calibrate(engine())


def session_of(
    policy: KVPolicy, ids: list[int], budget: Budget = NATIVE, new: int = 64, chunk: int = 1024
) -> KVSession:
    session = KVSession(engine(), policy.fit(budget, geometry_of(engine()), len(ids), new), budget, 1, max_new=new)
    session.prefill([ids], chunk)
    return session


def held(session: KVSession, layer: int, head: int, row: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values [S, D] that one head attends to, in order of position."""
    store = session.layers[layer]
    slots, segment = store.read(False), row * store.num_heads + head
    begin, count = slots.start[segment], slots.count[segment]
    index = store.unit_index(row)[min(head, len(store.unit_index(row)) - 1), :count]
    pos = store.table.rect().pos[row, min(head, store.table.num_heads - 1)][index]
    order = torch.argsort(pos, stable=True)
    return slots.k[begin : begin + count][order], slots.v[begin : begin + count][order]


def exact(ids: list[int], layer: int, head: int, after: Sequence[int] = (), chunk: int = 1024) -> tuple[Tensor, Tensor]:
    """What FullKV holds after the same steps: the shape of a step changes the last bits of keys and values."""
    session = session_of(FullKV(), ids, Budget("1.0"), chunk=chunk)
    for token in after:
        session.decode([token])
    return held(session, layer, head)


# ---- KIVI ----


@pytest.mark.parametrize(("steps", "counts"), [(0, (256, 44, 172, 128)), (84, (384, 0, 256, 128))])
def test_kivi_vector(steps: int, counts: tuple[int, ...]) -> None:
    """T = 300, R = 128, G = 32."""
    assert naive.kivi_counts(300, steps, 128) == counts
    session = session_of(KIVI(every=1), random_ids(300, 1))
    for token in random_ids(steps, 2):
        session.decode([token])
    tier = session.layers[3].table.rect().tier[0, 0, : 300 + steps]
    assert ((tier > 0).sum(), (tier == 0).sum(), (tier == 2).sum(), (tier < 2).sum()) == counts
    assert tier.tolist() == sorted(tier.tolist(), reverse=True)  # the newest tokens are the exact ones


@pytest.mark.parametrize("chunk", [1024, 20])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(("length", "steps", "group", "residual"), [(63, 9, 4, 12), (63, 0, 7, 7), (11, 40, 4, 16)])
def test_kivi_equals_its_transcription(
    length: int, steps: int, group: int, residual: int, bits: int, chunk: int
) -> None:
    """Layer 0, whose keys and values depend on the tokens alone."""
    ids, after = random_ids(length, 3), random_ids(steps, 4)
    session = session_of(KIVI(bits=bits, group=group, residual=residual, every=1), ids, chunk=chunk)
    for token in after:
        session.decode([token])
    channels = math.gcd(group, 16)
    for head in range(3):
        k, v = exact(ids, 0, head, after, chunk)
        args = (length, bits, group, residual, channels, torch.float32)
        k_naive, v_naive = naive.kivi(k.tolist(), v.tolist(), *args)
        k_held, v_held = held(session, 0, head)
        assert torch.equal(v_held, torch.tensor(v_naive))
        # the decoder may fuse code * scale + zero into one rounding
        torch.testing.assert_close(k_held, torch.tensor(k_naive), atol=1e-6, rtol=1e-6)
    counts = naive.kivi_counts(length, steps, residual)
    for layer in session.layers.values():
        tier = layer.table.rect().tier[0, 0]
        assert (int((tier > 0).sum()), int((tier == 2).sum())) == (counts[0], counts[2])


def codes_of(session: KVSession, layer: int = 0) -> list[dict[tuple[int, int], list[int]]]:
    """Packed codes of keys and of values by (KV head, position)."""
    store, found = session.layers[layer], []
    rect = store.table.rect()
    for side in store.sides:
        codes: dict[tuple[int, int], list[int]] = {}
        for number, lane in enumerate(side.lanes):
            mask = store.per_head(side.lane_map(rect.coded) == number)[0]
            if lane.slot and lane.slot[0].dtype == torch.uint8:
                at = torch.nonzero(mask)
                pos = store.per_head(rect.pos)[0][mask].tolist()
                entries = zip(at[:, 0].tolist(), pos, lane.slot[0].flatten(1).tolist(), strict=True)
                codes.update({(head, p): code for head, p, code in entries})
        found.append(codes)
    return found


@pytest.mark.parametrize("policy", [KIVI(group=4, residual=12, every=3), KVQuant(every=5), MiKV()], ids=str)
def test_old_codes_are_immutable_under_appends(policy: KVPolicy) -> None:
    session = session_of(replace(policy, **calibrated(policy)), random_ids(63, 1))
    before = codes_of(session)
    for step, token in enumerate(random_ids(40, 2)):
        if step == 20:
            session.append([random_ids(13, 3)])
        session.decode([token])
        for old, new in zip(before, codes_of(session), strict=True):
            assert all(new[at] == code for at, code in old.items())
            old.update(new)
    assert all(len(codes) > (3 * 63 if policy.unit == 1 else 3 * 3) for codes in before)


def test_zipcache_codes_everything_again_and_drifts() -> None:
    """What the class of a method that `recompresses` does in place of keeping codes, measured on values of layer 0."""
    session = session_of(ZipCache(gap=5), random_ids(63, 1))
    first = [held(session, 0, head)[1][:63].clone() for head in range(3)]
    drift = []
    for step, token in enumerate(random_ids(40, 2), 1):
        session.decode([token])
        now = [held(session, 0, head)[1][:63] for head in range(3)]
        drift.append(max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(now, first, strict=True)))
        assert (drift[-1] > 0) == (step >= 5)
    assert drift[-1] < 1


def calibrated(policy: KVPolicy) -> dict[str, Any]:
    return {"codebooks": codebooks()} if isinstance(policy, KVQuant) else {}


@pytest.mark.parametrize("cut", [1, 11, 12, 13, 24, 40])
def test_kivi_one_shot_equals_appends(cut: int) -> None:
    """Prefill of T tokens = prefill of T - n, then n decode steps: keys and values of layer 0, code by code."""
    ids = random_ids(71, 5)
    policy = KIVI(group=4, residual=12, every=1)
    whole, parts = session_of(policy, ids), session_of(policy, ids[:-cut])
    for token in ids[-cut:]:
        parts.decode([token])
    assert codes_of(whole) == codes_of(parts)
    question = session_of(policy, ids[:-cut])
    question.append([ids[-cut:]])
    assert codes_of(whole) == codes_of(question)


@pytest.mark.parametrize("spec", ["0.3", "0.5", "0.8", "100t"])
@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_takes_the_largest_residual_that_fits(spec: str, bits: int) -> None:
    budget, geometry, length, new = Budget(spec), geometry_of(engine()), 300, 40
    if (bits, spec) in ((4, "0.3"), (4, "100t")):
        with pytest.raises(Infeasible, match="nearest feasible fraction"):
            KIVI(bits=bits).fit(budget, geometry, length, new)
        return
    fitted = KIVI(bits=bits).fit(budget, geometry, length, new)
    assert fitted.group == 32
    assert fitted.residual % 32 == 0
    for residual in range(fitted.residual, length + 64, 32):
        tried = replace(fitted, residual=residual)
        worst = []
        for seen in range(length, length + new + 1, 8):
            allowed = budget.allowed_bytes(geometry, length, seen, new) or 0
            worst.append(4 * tried.layer_bytes(geometry, seen) <= allowed)
        assert all(worst) == (residual == fitted.residual)


def test_kivi_bytes_are_those_of_the_store() -> None:
    geometry = geometry_of(engine())
    for length in (63, 128, 300, 317):
        session = session_of(KIVI(group=32, residual=64), random_ids(length, 1))
        assert session.usage(0).total == 4 * session.policy.layer_bytes(geometry, length)  # type: ignore[attr-defined]


# ---- non-uniform codes ----


def unit_of(seed: int, tokens: int = 7, dim: int = 24, scale: float = 1.0) -> Tensor:
    return torch.randn(1, tokens, dim, generator=torch.Generator().manual_seed(seed)) * scale


@given(st.integers(0, 10**6), st.sampled_from((2, 3, 4)), st.sampled_from((0.0, 0.01, 0.05)), st.booleans())
@settings(max_examples=60, deadline=None)
def test_nuq_equals_its_transcription(seed: int, bits: int, share: float, flat: bool) -> None:
    x_1TD = unit_of(seed)
    if flat:  # ties: rank decides, not a threshold
        x_1TD[..., ::3] = x_1TD[0, 0, 0]
        x_1TD[:, 2] = 1.5
    centroids = torch.rand(1 << bits, generator=torch.Generator().manual_seed(seed)).mul(2).sub(1).sort().values
    book, sparse = tuple(centroids.tolist()), Sparse(share, 7)
    count = int(Fraction(str(share)) * 7 * 24 + Fraction(1, 2))
    low, high = torch.full((1, 24), -1.5), torch.linspace(0.5, 2.0, 24)[None]
    low[0, 5] = high[0, 5]  # a channel without range
    keys = NuqKeys(bits, sparse, book, (low, high))
    ref = tuple(param[:1] for param in keys.reference(x_1TD))
    code = keys.encode(x_1TD, ref)
    codes, back, out = naive.nuq_keys(x_1TD[0].tolist(), low[0].tolist(), high[0].tolist(), list(book), count)
    assert len(out) == count
    torch.testing.assert_close(keys.decode(*code, ref, torch.float32)[0], torch.tensor(back), atol=1e-6, rtol=1e-6)
    if count:
        assert {(i // 24, i % 24) for i in code.group[1][0].tolist()} == out
        assert code.group[0][0].tolist() == [x_1TD[0, i // 24, i % 24].item() for i in code.group[1][0].tolist()]
    assert all(0 <= c < 1 << bits for row in codes for c in row)
    values = NuqValues(bits, sparse, book)
    code = values.encode(x_1TD, ())
    back, out = naive.nuq_values(x_1TD[0].tolist(), list(book), count)
    if count and not flat:
        assert {(i // 24, i % 24) for i in code.group[1][0].tolist()} == out
    if not flat:
        found = values.decode(*code, (), torch.float32)[0]
        assert ((found - torch.tensor(back)).abs() < 1e-5).float().mean() > 0.99  # a tie may round either way


def test_nuq_of_an_even_codebook_is_uniform() -> None:
    """Centroids -1, -1/3, 1/3, 1 at 2 bits decode as min-max; a channel with bounds -1, 1 has the codebook itself."""
    x_1TD = unit_of(1)
    plain = PerToken(2)
    code, uniform = NuqValues(2, Sparse(0.0, 7), UNIFORM[2]).encode(x_1TD, ()), plain.encode(x_1TD, ())
    assert torch.equal(code.slot[0], uniform.slot[0])
    decoded = NuqValues(2, Sparse(0.0, 7), UNIFORM[2]).decode(*code, (), torch.float32)
    torch.testing.assert_close(decoded, plain.decode(*uniform, (), torch.float32), atol=1e-6, rtol=1e-6)
    keys = NuqKeys(3, Sparse(0.0, 8), UNIFORM[3], (-torch.ones(1, 8), torch.ones(1, 8)))
    ladder = torch.tensor(UNIFORM[3])[None, :, None].expand(1, 8, 8).contiguous()
    ref = keys.reference(ladder)
    assert torch.equal(keys.decode(*keys.encode(ladder, ref), ref, torch.float32), ladder)


def test_key_codes_depend_on_no_other_token() -> None:
    keys = NuqKeys(3, Sparse(0.01, 16), UNIFORM[3], (torch.full((1, 16), -2.0), torch.full((1, 16), 2.0)))
    x_1TD = unit_of(3, 16, 16)
    other = x_1TD.clone()
    other[0, 7] = 100.0
    ref = keys.reference(x_1TD)
    first, second = keys.encode(x_1TD, ref).slot[0][0], keys.encode(other, ref).slot[0][0]
    rest = [t for t in range(16) if t != 7]
    assert torch.equal(first[rest], second[rest])
    assert not torch.equal(first[7], second[7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nuq_outliers_are_exact_and_constants_survive(dtype: torch.dtype) -> None:
    x_1TD = unit_of(4, 16, 64).to(dtype)
    x_1TD[0, 3, 5], x_1TD[0, 9, 60], x_1TD[0, 11] = 77.0, -50.0, 2.5
    bounds = (torch.full((1, 64), -3.0), torch.full((1, 64), 3.0))
    for codec in (NuqKeys(2, Sparse(0.01, 16), UNIFORM[2], bounds), NuqValues(2, Sparse(0.01, 16), UNIFORM[2])):
        ref = codec.reference(x_1TD)
        code = codec.encode(x_1TD, ref)
        back = codec.decode(*code, ref, dtype)
        assert code.group[0].shape == (1, 10)  # 1 % of 1024
        assert back[0, 3, 5] == 77
        assert back[0, 9, 60] == -50
        assert bool(back.isfinite().all())
        if isinstance(codec, NuqValues):
            assert bool((back[0, 11] == 2.5).all())
        sizes = codec.slot_bytes(64, dtype.itemsize), codec.group_bytes(64, dtype.itemsize)
        assert sizes == tuple(
            sum(x[0, ...].nbytes for x in part) // n for part, n in ((code.slot, 16), (code.group, 1))
        )


def test_more_outliers_than_an_index_reaches_are_refused() -> None:
    assert Sparse(0.01, longest_unit(256)).count(256) == 328  # 1 % of 2^15
    with pytest.raises(ValueError, match="int16 index reaches; take at most 128$"):
        Sparse(0.01, longest_unit(256) + 1).count(256)
    for wrong in (
        lambda: Sparse(0.5),
        lambda: KVQuant(bits=5),
        lambda: KVQuant(outliers=-0.1),
        lambda: KVQuant(block=0),
    ):
        with pytest.raises(ValueError, match="outliers|bits|block"):
            wrong()


# ---- KVQuant ----


def test_kvquant_keeps_sinks_and_the_unfinished_block() -> None:
    """Exact: 5 sinks, and what no block of 16 holds. Blocks are what the codecs make of un-rotated keys."""
    ids = random_ids(63, 3)
    session = session_of(KVQuant(codebooks=codebooks()), ids)
    store = session.layers[0]
    key, value = store.tiers[1].key, store.tiers[1].value
    for head in range(3):
        (k, v), (k_held, v_held) = exact(ids, 0, head), held(session, 0, head)
        for part in (slice(0, 5), slice(53, 63)):
            assert torch.equal(k_held[part], k[part])
            assert torch.equal(v_held[part], v[part])
        plain = store.rope.unrotate(k, torch.arange(63), 0, 63)[5:53].unflatten(0, (3, 16))
        ref = tuple(param[head : head + 1].expand(3, -1) for param in key.reference(plain))
        k_back = key.decode(*key.encode(plain, ref), ref, torch.float32).flatten(0, 1)
        k_back = store.rope.rotate(k_back, torch.arange(5, 53), 0, 63)
        assert ((k_held[5:53] - k_back).abs() < 1e-4).float().mean() > 0.995
        v_units = v[5:53].unflatten(0, (3, 16))
        v_back = value.decode(*value.encode(v_units, ()), (), torch.float32).flatten(0, 1)
        torch.testing.assert_close(v_held[5:53], v_back)


def test_kvquant_keeps_sinks_that_are_as_long_as_a_block() -> None:
    session = session_of(KVQuant(sinks=16, block=16, codebooks=codebooks()), random_ids(63, 3))
    rect = session.layers[0].table.rect()
    assert rect.pos[0, 0, :4].tolist() == [0, 16, 32, 48]
    assert rect.tier[0, 0, :4].tolist() == [FULL, 1, 1, FULL]


def test_kvquant_fills_with_the_newest_blocks() -> None:
    policy = KVQuant(codebooks=codebooks())
    filled = session_of(policy, random_ids(300, 1), Budget("0.5"))
    tiers = filled.layers[2].table.rect().tier[0, 0, :19].tolist()
    assert tiers[0] == FULL
    assert tiers[1:] == sorted(tiers[1:], reverse=True)  # coded first, exact after
    assert tiers.count(FULL) > 2
    assert filled.trace[0].after_prefill > 0.5 - 16 / 300
    bare = session_of(replace(policy, fill=False), random_ids(300, 1), Budget("0.5"))
    assert bare.layers[2].table.rect().tier[0, 0, :19].tolist() == [FULL] + [1] * 18
    assert session_of(policy, random_ids(300, 1)).layers[2].table.rect().tier[0, 0, :19].tolist() == [FULL] + [1] * 18


def test_a_missing_calibration_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QEVICT_BENCH_CACHE", str(tmp_path))
    loaded = engine()
    options: dict[str, Any] = {"max_new_tokens": [2], "stop": (), "seed": 0, "example_ids": ["0"]}
    run = (Budget("0.6"), [prompt(random_ids(200, 1))])
    with pytest.raises(ValueError, match=r"python scripts/calibrate_kvquant.py model=tiny"):
        generate(loaded, KVQuant(), *run, **options)
    path = codebooks().save(loaded.fingerprint, {"text": "prose"})
    [made] = generate(loaded, KVQuant(), *run, **options)
    assert made.knobs == {"codebooks": codebooks().digest}
    assert Codebooks.load("tiny", loaded.fingerprint) == codebooks()
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"cannot be read.*calibrate_kvquant.py model=tiny"):
        generate(loaded, KVQuant(), *run, **options)
    with pytest.raises(ValueError, match="prepare"):
        KVSession(loaded, KVQuant(), NATIVE, 1)


Tables = dict[str, Tensor]


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tables], Tables]:
    """A change of one table of a calibration."""
    return lambda tables: {**tables, name: change(tables[name])}


def without(start: str) -> Callable[[Tables], Tables]:
    return lambda tables: {name: table for name, table in tables.items() if not name.startswith(start)}


def doubled(tables: Tables) -> Tables:
    return {name: torch.cat((x, x)) if x.dim() == 2 else x for name, x in tables.items()}


UNUSABLE = {
    "a layer in part": (without("0.key.nuq3"), r"it lacks 0.key.nuq3"),
    "no tables": (lambda tables: {}, r"it has no tables"),
    "a weight": (lambda tables: {**tables, "lm_head.weight": torch.ones(2)}, r"it has lm_head.weight, which is no"),
    "a table too many": (lambda tables: {**tables, "0.key.nuq5": torch.ones(32)}, r"it has 0.key.nuq5, which is no"),
    "flat bounds": (
        lambda tables: {n: x.flatten() for n, x in tables.items()},
        r"its bounds have the shape \[48\], not heads x channels",
    ),
    "one layer doubled": (put("1.key.high", lambda x: torch.cat((x, x))), r"1.key.high is torch.float32 \[6, 16\]"),
    "3 bits for 2": (
        put("1.value.nuq2", lambda x: torch.linspace(-1, 1, 8)),
        r"1.value.nuq2 is .* \[8\], not .* \[4\]",
    ),
    "half precision": (put("1.value.nuq2", Tensor.half), r"1.value.nuq2 is torch.float16 \[4\], not torch.float32"),
    "NaN": (put("2.key.nuq4", lambda x: x * torch.nan), r"2.key.nuq4 has values that are not finite"),
    "an infinite bound": (put("2.key.high", lambda x: x * torch.inf), r"2.key.high has values that are not finite"),
    "descending": (put("3.value.nuq3", lambda x: x.flip(0)), r"3.value.nuq3 does not ascend"),
    "bounds crossed": (put("3.key.low", lambda x: x + 1e6), r"3.key.low exceeds 3.key.high"),
}
"""Changes of a calibration of the tiny model (3 KV heads of 16 channels), and what is said of them."""


@pytest.mark.parametrize(("change", "said"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_calibration_is_neither_loaded_nor_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Tables], Tables], said: str
) -> None:
    """Although its file names the model and the digest of what it holds. A good one stays where it is."""
    monkeypatch.setenv("QEVICT_BENCH_CACHE", str(tmp_path))
    path, wrong = codebooks().save("print", {}), Codebooks.of(change(dict(codebooks().tables)))
    with pytest.raises(ValueError, match=f"^the calibration failed: {said}.*; try model.dtype=float32"):
        wrong.save("print", {})
    assert Codebooks.load("tiny", "print") == codebooks()
    assert list(path.parent.iterdir()) == [path]
    save_file(dict(wrong.tables), path, metadata={"fingerprint": "print", "digest": wrong.digest})
    with pytest.raises(ValueError, match=rf"cannot be read \({said}.*\); make it with: python .* model=tiny$") as error:
        Codebooks.load("tiny", "print")
    assert len(str(error.value).splitlines()) == 1


def test_a_calibration_file_must_say_whose_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another model, one without metadata (as older versions wrote), and one changed afterwards."""
    monkeypatch.setenv("QEVICT_BENCH_CACHE", str(tmp_path))
    path, good = codebooks().save("print", {}), dict(codebooks().tables)
    notes = {"fingerprint": "print", "digest": codebooks().digest}
    for tables, metadata, said in (
        (good, {**notes, "fingerprint": "other"}, "names another model, or none"),
        (good, {"text": "prose"}, "names another model, or none"),
        (good, None, "names another model, or none"),
        (good, {"fingerprint": "print"}, "changed after"),
        (doubled(good), notes, "changed after"),
        (put("0.key.nuq2", lambda x: x / 2)(good), notes, "changed after"),
    ):
        save_file(tables, path, metadata=metadata)
        with pytest.raises(ValueError, match=rf"cannot be read \(its .*{said}.*make it with: python .* model=tiny$"):
            Codebooks.load("tiny", "print")
    save_file(good, path, metadata=notes)
    assert Codebooks.load("tiny", "print") == codebooks()


def test_a_folder_in_the_way_of_a_calibration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QEVICT_BENCH_CACHE", str(tmp_path))
    (Codebooks.path("print") / "below").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"print.safetensors cannot be written .*QEVICT_BENCH_CACHE"):
        codebooks().save("print", {})
    assert [path.name for path in (tmp_path / "kvquant").iterdir()] == ["print.safetensors"]


def test_tables_of_another_shape_do_not_run() -> None:
    """All layers doubled alike, as of a model with twice the heads; and a layer that was never calibrated."""
    other = Codebooks.of(doubled(dict(codebooks().tables)))
    assert (other.head_dim, codebooks().head_dim) == (16, 16)
    with pytest.raises(ValueError, match=r"bounds for \[6, 16\] heads x channels, the model has \[3, 16\]; make it"):
        session_of(KVQuant(codebooks=other), random_ids(63, 1))
    with pytest.raises(ValueError, match=r"lacks 3.key.nuq3; make it with: python scripts/calibrate_kvquant.py"):
        session_of(KVQuant(codebooks=Codebooks.of(without("3.")(dict(codebooks().tables)))), random_ids(63, 1))


# ---- calibration ----


def test_k_means_equals_its_transcription() -> None:
    generator = torch.Generator().manual_seed(1)
    values, weights = torch.randn(200, generator=generator), torch.rand(200, generator=generator) ** 4
    found = script("calibrate_kvquant").codebooks(values, weights)
    for bits, book in found.items():
        start = sorted(values.tolist())
        centers = [start[int((i + 0.5) / (1 << bits) * 200)] for i in range(1 << bits)]
        expected = naive.lloyd(values.tolist(), weights.tolist(), centers, 60)
        assert book.tolist() == pytest.approx(expected, abs=1e-6)


def test_weights_draw_centroids() -> None:
    """Without weights they spread over all values; with weight on a few, they go there."""
    values = torch.linspace(-1, 1, 1001)
    heavy = torch.where((values - 0.5).abs() < 0.05, 1e6, 1.0)
    even, drawn = (script("calibrate_kvquant").codebooks(values, w)[3] for w in (torch.ones(1001), heavy))
    assert even.diff().max() == pytest.approx(0.25, abs=0.01)
    assert int(((drawn - 0.5).abs() < 0.05).sum()) >= 2 > int(((even - 0.5).abs() < 0.05).sum())
    unweighted = script("calibrate_kvquant").codebooks(values, torch.zeros(1001))[3]
    assert torch.equal(unweighted, even)


def test_gradients_are_those_of_the_projections() -> None:
    """What the script notes at the attention, turned back, is the output of k_proj and v_proj and its gradient."""
    ids = random_ids(40, 6)
    sample = script("calibrate_kvquant").observe(engine(), ids)
    twin = copy.deepcopy(eager()).requires_grad_(True)
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, out: Tensor) -> None:
            out.retain_grad()
            seen[name] = out

        return hook

    for index, layer in enumerate(twin.model.layers):
        layer.self_attn.k_proj.register_forward_hook(keep(f"{index}.k"))
        layer.self_attn.v_proj.register_forward_hook(keep(f"{index}.v"))
    logits = twin(torch.tensor([ids])).logits
    torch.nn.functional.cross_entropy(logits[0, :-1], torch.tensor(ids[1:]), reduction="sum").backward()
    rope = KVSession(engine(), FullKV(), Budget("1.0"), 1).layers[0].rope
    at = torch.arange(40)
    for index in range(4):
        keys, values = sample.kept[index]
        for name, found in (("k", keys), ("v", values)):
            assert found.grad is not None
            expected = seen[f"{index}.{name}"]
            for x, y in ((found.detach(), expected.detach()), (found.grad, expected.grad)):
                turned = rope.unrotate(x[0], at, index, 40) if name == "k" else x[0]
                torch.testing.assert_close(turned, y[0].unflatten(-1, (3, 16)).transpose(0, 1), atol=1e-4, rtol=1e-3)


def test_calibration_is_reproducible_and_fits_the_model() -> None:
    """On text it has not seen, fitted centroids beat evenly spaced ones within the same bounds."""
    assert calibrate(engine()) == codebooks()
    cfg = OmegaConf.create({"text": "prose", "samples": 1, "length": 405, "seed": 1})
    [ids] = script("calibrate_kvquant").texts_of(cfg, engine())
    for layer in range(4):
        low, high = codebooks().bounds(layer)
        assert bool((low < high).all())
        rope = KVSession(engine(), FullKV(), Budget("1.0"), 1).layers[layer].rope
        k, v = exact(ids, layer, 0)
        errors: dict[str, list[float]] = {"key": [], "value": []}
        for fitted in (True, False):
            books = {side: codebooks().centroids(layer, side, 3) if fitted else UNIFORM[3] for side in errors}
            assert all(list(book) == sorted(book) and len(book) == 8 for book in books.values())
            key, value = NuqKeys(3, Sparse(), books["key"], (low, high)), NuqValues(3, Sparse(), books["value"])
            plain = rope.unrotate(k, torch.arange(405), layer, 405)
            for side, codec, x in (("key", key, plain), ("value", value, v)):
                units = x[5:].unflatten(0, (-1, 16))
                ref = tuple(param[:1].expand(len(units), -1) for param in codec.reference(x.expand(3, -1, -1)))
                back = codec.decode(*codec.encode(units, ref), ref, torch.float32)
                errors[side].append(float((back - units).square().mean()))
        assert errors["key"][0] < errors["key"][1]
        assert errors["value"][0] < errors["value"][1]


@pytest.mark.parametrize("kind", ["gemma3", "qwen3", "phi3_partial", "mistral", "mixtral"])
def test_other_families_are_calibrated_and_run(kind: str) -> None:
    """Sliding layers, normed keys, a fused projection, partial rotation, one KV head, experts."""
    loaded = family(kind)
    ids = [random_ids(120, seed) for seed in (1, 2)]
    made = script("calibrate_kvquant").calibrate(loaded, ids)
    assert {int(name.split(".")[0]) for name in made.tables} == set(loaded.compressible_layers)
    for policy in (KVQuant(codebooks=made), KIVI(group=8, residual=8), ZipCache(), MiKV()):
        budget = Budget("0.7")
        fitted = policy.fit(budget, geometry_of(loaded), 120, 10)
        session = KVSession(loaded, fitted, budget, 1, max_new=10)
        session.prefill([ids[0]])
        for token in random_ids(10, 3):
            assert bool(session.decode([token]).isfinite().all())
        assert session.trace[0].demotions
        assert not session.trace[0].evictions


def test_the_script_saves_what_it_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QEVICT_BENCH_CACHE", str(tmp_path))
    text = tmp_path / "text.txt"
    text.write_text("All happy families are alike. " * 20)
    asked = asked_of(text=str(text), samples=2, length=100)
    said = script("calibrate_kvquant").run(asked)
    made = Codebooks.load("tiny", engine().fingerprint)
    assert made.digest in said
    with safe_open(Codebooks.path(engine().fingerprint), "pt") as file:
        notes = file.metadata()
    assert (notes["samples"], notes["text"]) == ("2", str(text))
    assert (notes["fingerprint"], notes["digest"]) == (engine().fingerprint, made.digest)
    with pytest.raises(ValueError, match="600 tokens; 50 samples of 100 need"):
        script("calibrate_kvquant").run(replace(asked, samples=50))
    assert Codebooks.load("tiny", engine().fingerprint) == made


def asked_of(**fields: Any) -> Any:
    """The script's settings for the tiny model: those of its yaml, but for `fields`."""
    values = OmegaConf.to_container(OmegaConf.load(Path(__file__).parents[1] / "configs" / "calibrate_kvquant.yaml"))
    assert isinstance(values, dict)
    values = {name: value for name, value in values.items() if name not in ("defaults", "hydra")}
    return script("calibrate_kvquant").Calibration(ModelSpec("tiny", "tiny", device="cpu"), **{**values, **fields})


def test_the_script_takes_a_text_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set in memory in its place; a row without text adds nothing."""
    rows = datasets.Dataset.from_dict({"id": [1, 2, 3], "body": ["abc" * 40, None, "xyz" * 40]})
    calls = []

    def load_dataset(name: str, config: str, split: str) -> datasets.Dataset:
        calls.append((name, config, split))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    asked = asked_of(text="hub", hub_id="owner/name", hub_field="body", samples=2, length=101)
    one, two = script("calibrate_kvquant").texts_of(asked, engine())
    assert bytes(one[1:] + two[1:]) == b"abc" * 40 + b"xyz" * 26 + b"xy"
    assert calls == [("owner/name", "default", "train")]
    for wrong in ("text", "id"):
        with pytest.raises(ValueError, match=f"^hub_field={wrong} is no text field of owner/name; choose one of body$"):
            script("calibrate_kvquant").texts_of(replace(asked, hub_field=wrong), engine())


def test_a_run_is_named_by_its_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing one stops the command before anything is written; another one makes another run."""
    monkeypatch.setenv("QEVICT_BENCH_CACHE", str(tmp_path))
    fields = ["model=tiny", "method=kvquant", "task.context_length=4096", f"results_dir={tmp_path}"]
    with initialize_config_dir(str(Path(__file__).parents[1] / "configs"), version_base="1.3"):
        cfg = compose("run", overrides=[f"++{text}" if text.startswith("task.") else text for text in fields])
    with pytest.raises(ValueError, match=r"calibrate_kvquant.py model=tiny"):
        make_plan(cfg)
    names = set()
    for samples in (1, 2):
        calibrate(engine(), samples).save(engine().fingerprint, {})
        names.add(make_plan(cfg).job.row.run_id)
    assert len(names) == 2


# ---- ZipCache ----


def probes_of(length: int, name: str = "0", share: float = 0.05) -> set[int]:
    """The last 5 % and as many random earlier rows, drawn as the method says: from the row's generator."""
    policy = ZipCache(probes=share)
    session = KVSession(engine(), policy, NATIVE, 1, seeds=[name])
    mask = policy.probe(0, length, torch.tensor([length]), "prefill", session._rngs.__getitem__)
    assert mask is not None
    rows = set(torch.nonzero(mask[0])[:, 0].tolist())
    num = max(1, int(share * length))
    assert set(range(length - num, length)) <= rows
    assert len(rows) == min(2 * num, length)
    return rows


@pytest.mark.parametrize("length", [1, 2, 19, 63, 200])
def test_zipcache_probes_do_not_depend_on_chunks(length: int) -> None:
    policy, rows = ZipCache(), probes_of(length)
    session = KVSession(engine(), policy, NATIVE, 1, seeds=["0"])
    chunks: set[int] = set()
    for start in range(0, length, 7):
        stop = min(start + 7, length)
        mask = policy.probe(start, stop, torch.tensor([length]), "prefill", session._rngs.__getitem__)
        assert mask is not None
        chunks |= {start + i for i in torch.nonzero(mask[0])[:, 0].tolist()}
    assert chunks == rows
    assert probes_of(200, "0") != probes_of(200, "1")


@pytest.mark.parametrize("chunk", [1024, 20])
@pytest.mark.parametrize(("ratio", "high", "low"), [(0.6, 4, 2), (0.0, 4, 3), (1.0, 8, 2)])
def test_zipcache_equals_its_transcription(ratio: float, high: int, low: int, chunk: int) -> None:
    ids = random_ids(63, 3)
    session = session_of(ZipCache(ratio=ratio, high=high, low=low), ids, chunk=chunk)
    probes = probes_of(63)
    num = 63 - int(63 * (1 - Fraction(str(ratio))))
    for index, layer in enumerate(attentions(63, 3)):
        tier = session.layers[index].table.rect().tier[0, :, :63]
        scores = [naive.saliency(layer[2 * head : 2 * head + 2], probes) for head in range(3)]
        best = [naive.most_salient(score, num) for score in scores]
        assert [set(torch.nonzero(row == 1)[:, 0].tolist()) for row in tier] == best
        assert [int((row == 2).sum()) for row in tier] == [63 - num] * 3
        if index == 0:
            full = [exact(ids, 0, head, chunk=chunk) for head in range(3)]
            expected = naive.zipcache([k.tolist() for k, _ in full], [v.tolist() for _, v in full], best, high, low)
            same_as([held(session, 0, head) for head in range(3)], expected)


def same_as(found: list[tuple[Tensor, Tensor]], expected: tuple[list[Any], list[Any]]) -> None:
    """A quotient that lies halfway between two codes may go either way: few elements may differ by a step."""
    for head, pair in enumerate(found):
        for x, y in zip(pair, expected, strict=True):
            assert ((x - torch.tensor(y[head])).abs() < 1e-4).float().mean() > 0.999


def test_zipcache_saliency_of_uniform_attention() -> None:
    """All rows probed: (1 / (T - i)) * sum over q >= i of 1 / (q + 1)."""
    uniform = [[[1 / (q + 1) if i <= q else 0.0 for i in range(9)] for q in range(9)]]
    expected = [sum(1 / (q + 1) for q in range(i, 9)) / (9 - i) for i in range(9)]
    assert naive.saliency(uniform, set(range(9))) == pytest.approx(expected)
    session = session_of(ZipCache(), random_ids(9, 1))
    view = session.layers[0].view()
    view.columns["saliency"] = torch.zeros(view.pos_BHU.shape)
    for q in range(9):
        mass = torch.zeros(1, 3, 2, 1, view.pos_BHU.shape[-1])
        mass[..., : q + 1] = 0.5 / (q + 1)
        session.policy.observe(view, mass, torch.tensor([[q]]))
    assert view.columns["saliency"][0, 1, :9].tolist() == pytest.approx(expected)


def test_zipcache_with_all_tokens_important_is_uniform_4_bit() -> None:
    ids = random_ids(63, 3)
    session = session_of(ZipCache(ratio=1.0), ids)
    codec = PerChannel(4, "segment", 0, pre_rope=False)
    for head in range(3):
        k, _ = exact(ids, 0, head)
        assert torch.equal(held(session, 0, head)[0], codec.decode(*codec.encode(k[None], ()), (), torch.float32)[0])


def test_zipcache_recompresses_everything_every_gap() -> None:
    """Old tokens keep their class, new ones are ranked by the newest row; the naive codes start from decoded ones."""
    ids, after = random_ids(63, 3), random_ids(10, 4)
    session = session_of(ZipCache(gap=10), ids)
    old = [held(session, 0, head) for head in range(3)]
    classes = session.layers[0].table.rect().tier[0, :, :63].clone()
    for token in after:
        session.decode([token])
    tier = session.layers[0].table.rect().tier[0, :, :73]
    assert torch.equal(tier[:, :63], classes)
    assert [int((tier[head, 63:] == 1).sum()) for head in range(3)] == [6] * 3
    new = [exact(ids, 0, head, after) for head in range(3)]
    k_in, v_in = ([torch.cat((a[i], b[i][63:])).tolist() for a, b in zip(old, new, strict=True)] for i in (0, 1))
    best = [set(torch.nonzero(row == 1)[:, 0].tolist()) for row in tier]
    same_as([held(session, 0, head) for head in range(3)], naive.zipcache(k_in, v_in, best, 4, 2))


def test_balanced_channels_that_are_zero_stay_zero() -> None:
    x_1TD = unit_of(2, 9, 16)
    x_1TD[..., 3] = 0.0
    x_1TD[..., 8] *= 100
    codec = PerToken(4, balanced=True)
    back = codec.decode(*codec.encode(x_1TD, ()), (), torch.float32)
    torch.testing.assert_close(back[0], torch.tensor(naive.balanced_back(x_1TD[0].tolist(), 4)), atol=1e-6, rtol=1e-6)
    plain = PerToken(4).decode(*PerToken(4).encode(x_1TD, ()), (), torch.float32)
    rest = [d for d in range(16) if d != 8]
    assert (back - x_1TD)[..., rest].square().mean() < (plain - x_1TD)[..., rest].square().mean() / 4
    low = codec.encode(torch.cat((x_1TD, x_1TD * 0)), ())
    assert bool(codec.decode(*low, (), torch.float32).isfinite().all())


@pytest.mark.parametrize("policy", [ZipCache(), MiKV(), KIVI(), KVQuant()], ids=lambda policy: policy.name)
def test_rows_of_a_batch_equal_rows_alone(policy: KVPolicy) -> None:
    """Probes and classes too: every row has its own generator."""
    policy, prompts, after = (
        replace(policy, **calibrated(policy)),
        [random_ids(n, n) for n in (130, 171)],
        random_ids(20, 7),
    )
    budget = Budget("0.6")
    fitted = policy.fit(budget, geometry_of(engine()), 130, 20)
    batch = KVSession(engine(), fitted, budget, 2, max_new=20, seeds=["a", "b"])
    logits = [batch.prefill(prompts, 50), *(batch.decode([token] * 2) for token in after)]
    for row, ids in enumerate(prompts):
        alone = KVSession(engine(), fitted, budget, 1, max_new=20, seeds=["ab"[row]])
        expected = [alone.prefill([ids]), *(alone.decode([token]) for token in after)]
        assert kept(batch, row) == kept(alone, 0)
        assert batch.usage(row).counted == alone.usage(0).counted
        torch.testing.assert_close(torch.stack(logits)[:, row], torch.stack(expected)[:, 0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", ["0.3", "0.35", "0.5"])
def test_zipcache_spends_bytes_on_classes(spec: str) -> None:
    session = session_of(ZipCache(), random_ids(600, 1), Budget(spec), new=20)
    tier = session.layers[1].table.rect().tier[0, :, :600]
    high = [int((row == 1).sum()) for row in tier]
    assert len(set(high)) == 1
    used = session.trace[0].after_prefill
    assert used <= float(spec)
    assert used > float(spec) - 0.005 or high == [600] * 3


def test_zipcache_halves_its_gap_where_the_buffer_does_not_fit() -> None:
    geometry = Geometry(32, 8, 4, 128, 2)
    gaps = [
        ZipCache().fit(Budget(spec), geometry, n, 256).every
        for spec, n in (("0.25", 32768), ("0.25", 2048), ("0.2", 1024))
    ]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] == 100
    assert gaps[-1] < 100
    assert ZipCache().fit(NATIVE, geometry, 1024, 256).every == 100
    with pytest.raises(Infeasible, match="nearest feasible fraction"):
        ZipCache().fit(Budget("0.1"), geometry, 32768, 256)


# ---- MiKV ----


@pytest.mark.parametrize("chunk", [1024, 20])
@pytest.mark.parametrize("scope", ["kv_head", "layer"])
@pytest.mark.parametrize(("important", "recent", "bits"), [(0.2, 0.5, 2), (0.5, 0.0, 3), (0.3, 1.0, 4)])
def test_mikv_equals_its_transcription(important: float, recent: float, bits: int, scope: str, chunk: int) -> None:
    ids = random_ids(63, 3)
    policy = MiKV(bits=bits, important=important, recent=recent, head_scope=scope)
    session = session_of(policy, ids, chunk=chunk)
    num = int(63 * Fraction(str(important)))
    for index, layer in enumerate(attentions(63, 3)):
        tier = session.layers[index].table.rect().tier[0, :, :63]
        for head in range(3):
            queries = layer if scope == "layer" else layer[2 * head : 2 * head + 2]
            full = naive.important(naive.gathered(queries), num, recent)
            own = head if scope == "kv_head" else 0
            assert set(torch.nonzero(tier[own] == FULL)[:, 0].tolist()) == full
            if index == 0:
                k, v = exact(ids, 0, head, chunk=chunk)
                expected = naive.mikv(k.tolist(), v.tolist(), full, bits)
                for x, y in zip(held(session, 0, head), expected, strict=True):
                    torch.testing.assert_close(x, torch.tensor(y), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("spec", ["0.4", "0.6"])
def test_mikv_spends_its_bytes_and_evicts_nothing(spec: str) -> None:
    session = session_of(MiKV(), random_ids(600, 1), Budget(spec))
    for token in random_ids(40, 2):
        session.decode([token])
        used, whole, allowed = session.trace[0].decode[-1]
        assert allowed - whole * 0.02 < used <= allowed
    for layer in kept(session, 0):
        assert all(len(head) >= 640 for head in layer)


# ---- memory ----

LLAMA = Geometry(num_layers=32, num_kv_heads=8, group_size=4, head_dim=128, itemsize=2)


@cache
def random_layer() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, 8, 32768, 128)
    k, v = (torch.randn(shape, generator=generator, dtype=torch.bfloat16) for _ in range(2))
    return k, v


def even_codebooks() -> Codebooks:
    tables = {f"0.{side}.nuq{bits}": torch.tensor(UNIFORM[bits]) for side in ("key", "value") for bits in (2, 3, 4)}
    return Codebooks.of({**tables, "0.key.low": torch.full((8, 128), -3.0), "0.key.high": torch.full((8, 128), 3.0)})


@pytest.mark.parametrize(
    ("policy", "percent"),
    [
        (KIVI(), 19.0),
        (KIVI(group=128), 14.3),
        (KIVI(bits=4), 31.5),
        (KVQuant(codebooks=even_codebooks()), 21.5),  # 21 to 22
        (ZipCache(), 20.0),
    ],
    ids=["kivi_g32", "kivi_g128", "kivi4", "kvquant", "zipcache"],
)
def test_footprints_at_32k(policy: KVPolicy, percent: float, record_property: Any) -> None:
    """One real layer of Llama-3.1-8B at 32,768 tokens: codes, scales, outliers and residuals as allocated."""
    fitted = policy.fit(NATIVE, LLAMA, 32768, 128)
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=32768)
    rope = Rope(LlamaRotaryEmbedding(config), ["full_attention"] * 32, ["default"])
    layer = LayerStore(
        fitted, LLAMA, 0, rope, random_layer()[0][0, 0, :0], 1, lambda row: torch.Generator(), lambda: torch.empty(0)
    )
    with torch.inference_mode():
        layer.reserve([0], [32768], 0)
        layer.prompt_len = [32768]
        layer.append([0], [32768], *random_layer())
        layer.table.cover([32768 + fitted.cadence.decode_every])
        for column in layer.view().columns.values():
            column.uniform_()
        [placement] = fitted.place([layer.view()], PlacementCost([layer], [fitted.cadence.decode_every], None, False))
        layer.apply(placement, [0])
    counted = usage(layer, 0).counted
    whole = LLAMA.full_bytes(32768) / 32
    method = sum(
        size for name, size in counted.items() if name.startswith("payload") or name in ("params", "reference")
    )
    assert 100 * method / whole == pytest.approx(percent, abs=0.5)
    walked = sum(x.untyped_storage().nbytes() for x in layer.stored_tensors())
    assert walked == pytest.approx(sum(counted.values()), rel=0.001)
    record_property("percent", round(100 * method / whole, 2))
