"""Devices that share a model keep, say and hold what one device does."""

import dataclasses
import functools
import json
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax.calibrate.file import Calibration
from kvec_jax.models.checkpoint import load_checkpoint, save_checkpoint
from kvec_jax.models.load import load_model
from kvec_jax.testing import tiny_language_model, tiny_model
from tests.compilations import count_compilations
from tests.models import files
from tests.policies.cases import CASES
from tests.prompts import as_lists, batch

pytestmark = pytest.mark.skipif(
    jax.device_count() < 8, reason="needs eight devices: XLA_FLAGS=--xla_force_host_platform_device_count=8"
)

MESHES = {
    "data 2, tensor 4": ((2, 4), ("data", "tensor")),
    "data 4, tensor 2": ((4, 2), ("data", "tensor")),
    "data 1, tensor 8": ((1, 8), ("data", "tensor")),
    "tensor 8": ((8,), ("tensor",)),
    "data 8": ((8,), ("data",)),
    "tensor 4, data 2": ((4, 2), ("tensor", "data")),
}
# Shapes: as many key-value heads as the largest mesh has devices, grouped queries, a vocabulary of 256.
LLAMA = dict(num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8, head_dim=8)
GEMMA = LLAMA | dict(
    sliding_window=24,
    local_layers=(0,),
    qk_norm=True,
    post_norms=True,
    tie_word_embeddings=True,
    hidden_act="gelu_tanh",
)
QWEN = LLAMA | dict(attention_bias=True, num_attention_heads=8, num_key_value_heads=4)
LENGTHS = (90, 41, 77, 5, 90, 64, 33, 18)
PROMPTS = ["a" * 50, "Some other text. " * 6, "Short", "b " * 40]
CALIBRATION = Calibration(model="tiny", heads=((0, 9), (15, 2, 3)), layer_weights=(0.7, 0.3))
POLICIES = {
    "snapkv": kv.SnapKV(24, window=8),
    "kvec": kv.KVec(24, window=6, extended_window=8),
    "laprox": kv.LaProx(24, window=8),
    "compresskv": kv.CompressKV(24, calibration=CALIBRATION, low=12),
    "kvec everywhere": dataclasses.replace(kv.KVec(24, window=6, extended_window=8, importance="query"), scope="model"),
    "adakv": kv.AdaKV(24, scorer=kv.WindowAttention(window=8)),
}


def mesh_of(name):
    return jax.make_mesh(*MESHES[name])


@functools.cache
def model_of(shape: str = "llama", dtype: str = "float32"):
    return tiny_model(dtype=jnp.dtype(dtype), **{"llama": LLAMA, "gemma": GEMMA, "qwen": QWEN}[shape])


@functools.cache
def sharded(shape: str, mesh: str, dtype: str = "float32"):
    return kv.shard(model_of(shape, dtype), mesh_of(mesh))


@functools.cache
def run(name: str, shape: str, mesh: str | None = None, dtype: str = "float32"):
    """What is kept of the prompts, the logits, and what comes next."""
    model = model_of(shape, dtype) if mesh is None else sharded(shape, mesh, dtype)
    return run_policy(POLICIES[name], model)


def run_policy(policy, model, lengths=LENGTHS, **options):
    tokens, lengths = batch(lengths, max(lengths) + 3)
    logits, cache = kv.prefill(model, tokens, lengths, policy, reserve=20, **options)
    kept = [as_lists(cache.kept_positions(row)) for row in range(len(lengths))]
    new, cache = kv.decode(model, cache, logits, max_new_tokens=12, eos_token_ids=(7,))
    return kept, np.asarray(logits), np.asarray(new)


def check(found, wanted, atol=1e-5):
    assert found[0] == wanted[0]
    np.testing.assert_array_equal(found[2], wanted[2])
    np.testing.assert_allclose(found[1], wanted[1], atol=atol)


@pytest.mark.parametrize("name", ["snapkv", "kvec", "laprox", "compresskv"])
def test_devices_keep_and_say_what_one_does(name):
    check(run(name, "llama", "data 2, tensor 4"), run(name, "llama"))


# Each mesh with two policies, and each policy with the three shapes (the calibration is for one of them).
PAIRS = [
    ("kvec everywhere", "gemma", "tensor 8"),
    ("adakv", "llama", "tensor 8"),
    ("kvec", "gemma", "data 1, tensor 8"),
    ("laprox", "llama", "data 1, tensor 8"),
    ("laprox", "gemma", "data 4, tensor 2"),
    ("compresskv", "llama", "data 4, tensor 2"),
    ("adakv", "gemma", "tensor 4, data 2"),
    ("kvec", "qwen", "tensor 4, data 2"),
    ("laprox", "qwen", "data 4, tensor 2"),
    ("adakv", "qwen", "data 2, tensor 4"),
    ("snapkv", "gemma", "data 2, tensor 4"),
    ("kvec everywhere", "llama", "data 8"),
    ("snapkv", "qwen", "data 8"),
]


@pytest.mark.parametrize(
    "case", [PAIRS[0], *(pytest.param(case, marks=pytest.mark.slow) for case in PAIRS[1:])], ids=", ".join
)
def test_any_mesh_and_any_model(case):
    name, shape, mesh = case
    check(run(name, shape, mesh), run(name, shape))


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_bfloat16(name):
    check(run(name, "llama", "data 2, tensor 4", "bfloat16"), run(name, "llama", dtype="bfloat16"), atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_policy(name):
    changes = dict(num_key_value_heads=4, num_hidden_layers=4)
    model = tiny_model(**changes)
    found = run_policy(CASES[name].policy, kv.shard(model, mesh_of("data 2, tensor 4")))
    check(found, run_policy(CASES[name].policy, model))


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(cache_dtype="int4"), dict(chunk=32, rerotate=True)])
def test_options_of_prefill(options):
    policy = kv.TOVA(16) if "chunk" in options else POLICIES["laprox"]
    many = sharded("llama", "data 2, tensor 4")
    check(run_policy(policy, many, **options), run_policy(policy, model_of(), **options))
    later, now = (kv.prefill(many, *batch(LENGTHS, 93), policy, **more)[1] for more in ({}, dict(cache_dtype="int4")))
    np.testing.assert_array_equal(kv.quantise(later, "int4").keys, now.keys)


def test_sweep():
    many, policies = sharded("llama", "data 2, tensor 4"), (POLICIES["snapkv"], POLICIES["laprox"])
    tokens, lengths = batch(LENGTHS, 93)
    logits, caches = kv.sweep(many, tokens, lengths, policies, reserve=4)
    for cache, name in zip(caches, ("snapkv", "laprox"), strict=True):
        kept, wanted, _ = run(name, "llama", "data 2, tensor 4")
        assert [as_lists(cache.kept_positions(row)) for row in range(len(LENGTHS))] == kept
        np.testing.assert_allclose(logits, wanted, atol=1e-5)
    assert kv.extend(many, caches[0], tokens[:, :2])[1].mesh == many.mesh


@pytest.mark.parametrize("tail", [None, pytest.param(8, marks=pytest.mark.slow)])
def test_generate_with_random_keys(tail):
    tokens, lengths = batch(LENGTHS, 93)
    settings = dict(max_new_tokens=20, key=jax.random.key(3), eos_token_ids=(7, 9), tail=tail)
    policy, sampler = kv.TOVA(16), kv.Sample(temperature=0.8, top_k=50, repetition_penalty=1.3)
    wanted = kv.generate(model_of(), tokens, lengths, policy, sampler, **settings)
    found = kv.generate(sharded("llama", "data 2, tensor 4"), tokens, lengths, policy, sampler, **settings)
    np.testing.assert_array_equal(found, wanted)


def test_each_device_has_its_piece_and_nothing_is_compiled_twice():
    model = sharded("llama", "data 2, tensor 4")
    tokens, lengths = batch(LENGTHS, 93)
    _, cache = kv.prefill(model, tokens, lengths, POLICIES["snapkv"], reserve=20)
    assert cache.keys.addressable_shards[0].data.nbytes == cache.keys.nbytes // 8
    _, cache = kv.extend(model, cache, tokens[:, :3])
    with count_compilations() as compiled:
        _, again = kv.extend(model, cache, tokens[:, :3])
        kv.extend(model, again, tokens[:, :3])
    assert not compiled
    assert again.keys.sharding == cache.keys.sharding


def language_models():
    one = tiny_language_model(**LLAMA)
    return one, dataclasses.replace(one, model=kv.shard(one.model, mesh_of("data 2, tensor 4")))


def test_text_in_text_out():
    wanted, found = (lm.generate(PROMPTS, POLICIES["laprox"], max_new_tokens=6) for lm in language_models())
    assert [o.tokens for o in found] == [o.tokens for o in wanted]
    assert [o.stats.kept for o in found] == [o.stats.kept for o in wanted]


@pytest.mark.slow
def test_one_row_is_computed_by_every_group():
    wanted, found = (lm.generate("Some text", POLICIES["kvec"], max_new_tokens=6) for lm in language_models())
    assert found.tokens == wanted.tokens


@pytest.mark.slow
def test_contexts(tmp_path):
    one, many = language_models()
    alone, shared = (lm.extend(lm.compress("A fox. " * 20, POLICIES["laprox"]), "More of it.") for lm in (one, many))
    questions = ["Who?", "Why is that so?"]
    answers = [a.text for a in one.ask(alone, questions, max_new_tokens=6)]
    assert [a.text for a in many.ask(shared, questions, max_new_tokens=6)] == answers
    shared.save(tmp_path / "fox.kv")
    for lm in (one, many):
        loaded = kv.load_context(tmp_path / "fox.kv", lm)
        assert as_lists(loaded.cache.kept_positions(0)) == as_lists(alone.cache.kept_positions(0))
        assert [a.text for a in lm.ask(loaded, questions, max_new_tokens=6)] == answers
    with pytest.raises(ValueError, match="cache: expected one on the model's mesh"):
        one.ask(shared, "Who?")


def test_parameters_go_from_the_file_to_their_devices(tmp_path):
    config = files.small_config("qwen2", num_attention_heads=8, num_key_value_heads=4)
    folder = files.write_folder(tmp_path, config, files.random_tensors(config))
    mesh = mesh_of("tensor 4, data 2")
    one, many = load_model(folder).model, load_model(folder, mesh=mesh).model
    save_checkpoint(tmp_path / "saved", many)
    for model in (many, load_checkpoint(tmp_path / "saved", mesh=mesh)[0]):
        assert model.mesh.axis_names == mesh.axis_names
        for whole, pieces in zip(jax.tree.leaves(one), jax.tree.leaves(model), strict=True):
            np.testing.assert_array_equal(whole, pieces)
            assert pieces.addressable_shards[0].data.size in (pieces.size, pieces.size // 4)
        assert tuple(model.layers.o_proj.get_value().sharding.spec) == (None, None, "tensor")


def test_rows_of_a_cache_and_room():
    caches = []
    for model in (model_of(), sharded("llama", "data 2, tensor 4")):
        _, cache = kv.prefill(model, *batch(LENGTHS, 93), POLICIES["laprox"], reserve=20)
        caches.append(cache.take_rows(jnp.array([3, 0, 0, 5])).reserve(29))
    for row in range(4):
        assert as_lists(caches[1].kept_positions(row)) == as_lists(caches[0].kept_positions(row))
    np.testing.assert_array_equal(kv.coverage(caches[1]), kv.coverage(caches[0]))
    tokens = batch(LENGTHS[:4], 93)[0][:, :9]
    logits = [kv.extend(m, c, tokens)[0] for m, c in zip((model_of(), sharded("llama", "data 2, tensor 4")), caches)]
    np.testing.assert_allclose(*logits, atol=1e-5)
    assert (
        caches[1].keys.sharding == kv.extend(sharded("llama", "data 2, tensor 4"), caches[1], tokens)[1].keys.sharding
    )


def test_what_cannot_be_divided_is_said():
    with pytest.raises(TypeError, match="mesh: expected a jax.sharding.Mesh, got 8"):
        kv.shard(model_of(), 8)
    with pytest.raises(ValueError, match=r"mesh: expected axes 'data' and 'tensor', one or both, got \('x',\)"):
        kv.shard(model_of(), jax.make_mesh((8,), ("x",)))
    with pytest.raises(ValueError, match="mesh: num_key_value_heads = 4 can't be divided among 8 devices"):
        kv.shard(model_of("qwen"), mesh_of("tensor 8"))
    with pytest.raises(ValueError, match="mesh: vocab_size = 250 can't be divided among 4 devices"):
        kv.shard(tiny_model(**LLAMA, vocab_size=250), mesh_of("data 2, tensor 4"))
    model = sharded("llama", "data 2, tensor 4")
    with pytest.raises(ValueError, match="batch: expected one row, or a multiple of 2 .* got 3"):
        kv.prefill(model, *batch(LENGTHS[:3], 93), POLICIES["snapkv"])
    with pytest.raises(kv.UnsupportedError, match="policy: only policies that choose rows work on a mesh, and 'sekv'"):
        kv.prefill(model, *batch(LENGTHS, 93), kv.SeKV(0.5))
    with pytest.raises(kv.UnsupportedError, match="select_top_k: .*pallas_tpu.*the entries are on several devices"):
        kv.prefill(
            model, *batch(LENGTHS, 93), kv.LaProx(40), implementation=kv.Implementations(select_top_k="pallas_tpu")
        )
    _, cache = kv.prefill(model_of(), *batch(LENGTHS, 93), POLICIES["snapkv"], reserve=3)
    with pytest.raises(ValueError, match="cache: expected one on the model's mesh"):
        kv.extend(model, cache, batch(LENGTHS, 93)[0][:, :3])


def test_no_keys_or_values_travel():
    model = sharded("llama", "data 2, tensor 4")
    read = jax.jit(lambda *args: kv.prefill(*args, POLICIES["laprox"]))
    text = read.lower(model, *batch(LENGTHS, 93)).compile().as_text()
    sent = re.findall(r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute)\S*\(", text)
    shapes = [tuple(map(int, dims.split(","))) for found in sent for dims in re.findall(r"\[([\d,]+)\]", found)]
    assert (4, 93, 128) in shapes  # heads' outputs
    assert not [shape for shape in shapes if 93 in shape and shape[-1] == 8]  # 93 tokens of head size 8


_A_PROCESS = """
import dataclasses, json, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
import jax
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
import kvec_jax as kv
from kvec_jax.testing import tiny_language_model
from tests.test_sharding import LLAMA, PROMPTS
lm = tiny_language_model(**LLAMA)
lm = dataclasses.replace(lm, model=kv.shard(lm.model, jax.make_mesh((2, 4), ("data", "tensor"))))
print(json.dumps([output.tokens for output in lm.generate(PROMPTS, kv.LaProx(24, window=8), max_new_tokens=6)]))
"""


@pytest.mark.slow
def test_two_processes():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    run = functools.partial(subprocess.Popen, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [run([sys.executable, "-c", _A_PROCESS, address, str(number)]) for number in range(2)]
    printed = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    wanted = tiny_language_model(**LLAMA).generate(PROMPTS, POLICIES["laprox"], max_new_tokens=6)
    for out, _ in printed:
        assert json.loads(out.splitlines()[-1]) == [output.tokens for output in wanted]
