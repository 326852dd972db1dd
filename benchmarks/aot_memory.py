"""Memory of a whole generation on a TPU that isn't here, as its compiler reports it."""

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

import kvec_jax as kv
from kvec_jax.generate import run_decode
from kvec_jax.implementations import OPERATIONS, Implementations
from kvec_jax.models.config import ModelConfig
from kvec_jax.models.rope import Rope
from kvec_jax.models.transformer import Transformer
from kvec_jax.pallas.aot import compile_for
from kvec_jax.policies.prepared import prepare
from kvec_jax.prefill import run_prefill

LLAMA_3_1_8B = ModelConfig(
    model_type="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope=Rope(theta=500_000.0, kind="llama3", factor=8.0),
    eos_token_ids=(128001, 128008, 128009),
)
TOKENS, NEW_TOKENS, BUDGET = 131072 - 128, 128, 1024
CHIPS = ("v5e", "v5p")
# What a TPU would choose by itself.
HOW = Implementations(**dict.fromkeys(OPERATIONS, "pallas_tpu"), interpret=False)
POLICIES = {"full cache": kv.FullCache(), f"SnapKV, budget {BUDGET}": kv.SnapKV(BUDGET)}

# What libtpu says of a program that needs more memory than there is.
_REFUSAL = re.compile(r"Used [\d.]+\w of [\d.]+\w hbm|the total memory .* exceeds available HBM \([^)]*\)")


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, and what the compiler said of its memory.

    Attributes:
        name: Which.
        policy: What is kept.
        chip: For which it was compiled.
        memory: The compiler's account; ``None`` if it refused.
        refusal: What it said then.
    """

    name: str
    policy: str
    chip: str
    memory: object = None
    refusal: str = ""


def lines(report: Callable[[str], None]) -> list[str]:
    """The table, in Markdown: full cache and compressed, for every chip."""
    return [
        "| program | cache | chip | arguments | results | reused | temporaries | together |",
        "|---|---|---|--:|--:|--:|--:|--:|",
        *(_line(program) for chip in CHIPS for policy in POLICIES for program in _programs(chip, policy, report)),
    ]


def _programs(chip: str, policy_name: str, report: Callable[[str], None]):
    policy = POLICIES[policy_name]
    model = nnx.eval_shape(lambda: Transformer(LLAMA_3_1_8B, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    prepared = jax.eval_shape(lambda model: prepare(policy, model), model)
    tokens, lengths = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)

    def read(model, prepared, tokens, lengths):
        return run_prefill(model, prepared, tokens, lengths, policy, NEW_TOKENS, how=HOW)

    def decode(model, cache, logits):
        ends, key = LLAMA_3_1_8B.eos_token_ids, jax.random.key(0)
        return run_decode(model, cache, logits, kv.Greedy(), key, NEW_TOKENS, ends, HOW)

    def generate(*arguments):
        logits, cache = read(*arguments)
        return decode(arguments[0], cache, logits).tokens

    prompt = model, prepared, tokens, lengths
    logits, cache = jax.eval_shape(read, *prompt)
    for name, function, arguments, donated in (
        ("decode", decode, (model, cache, logits), (1,)),
        ("prefill", read, prompt, ()),
        ("generate", generate, prompt, ()),
    ):
        report(f"{chip}, {policy_name}: {name}")
        try:
            compiled = compile_for(chip, function, *arguments, donate_argnums=donated)
        except jax.errors.JaxRuntimeError as error:
            refusal = _REFUSAL.search(str(error))
            if refusal is None:
                raise
            yield Program(name, policy_name, chip, refusal=refusal[0])
        else:
            yield Program(name, policy_name, chip, compiled.memory_analysis())


def _line(program: Program) -> str:
    start = f"| {program.name} | {program.policy} | {program.chip} |"
    if program.memory is None:
        return f"{start} {program.refusal} | | | | |"
    memory = program.memory
    arguments, results = memory.argument_size_in_bytes, memory.output_size_in_bytes
    reused, temporary = memory.alias_size_in_bytes, memory.temp_size_in_bytes
    together = arguments + results - reused + temporary
    return " ".join([start, *(f"{x / 1e9:.2f} |" for x in (arguments, results, reused, temporary, together))])
