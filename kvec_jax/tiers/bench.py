"""``kvec bench tiers``: what overlap and eviction are worth, with a store of given latency; tables and a timeline.

A prompt is read once; its cache is then put on tiers again for each variant, which all write the same number of tokens.
"""

import dataclasses
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvec_jax.sampling import Greedy
from kvec_jax.tiers.decoder import TieredDecoder
from kvec_jax.tiers.policy import Tiered
from kvec_jax.tiers.reading import Reading
from kvec_jax.tiers.recorder import Recorder
from kvec_jax.tiers.timeline import picture

VARIANTS = {
    "overlap, lookahead": dict(micro_batches=1),
    "fetch first, lookahead": dict(micro_batches=1, overlap=False),
    "overlap, lru": dict(micro_batches=1, eviction="lru"),
}
# Of a batch: one micro-batch's fetch overlaps another's computation.
TURNS = {"two micro-batches": dict(micro_batches=2)}


@dataclasses.dataclass(frozen=True)
class Result:
    """One variant with one latency.

    Attributes:
        variant: Its name.
        latency: Seconds added to every fetch.
        tokens_per_second: Of the batch; median over the repetitions.
        spread: Slowest and fastest repetition.
        hit_rate: Share of chosen blocks that were on the device.
        fetched_bytes: To the device, per step.
        disk_bytes: Read from disk, per step.
        seconds: By stage, per step.
        tokens: What was written, int32 [B, new].
    """

    variant: str
    latency: float
    tokens_per_second: float
    spread: tuple[float, float]
    hit_rate: float
    fetched_bytes: float
    disk_bytes: float
    seconds: dict[str, float]
    tokens: np.ndarray


def compare(reading: Reading, policies: dict[str, Tiered], latency: float, runs: int) -> list[Result]:
    """Each of ``policies`` writes ``runs`` times, in turn, after a round that warms up."""
    rates, seen = {name: [] for name in policies}, {}
    for repetition in range(runs + 1):
        for name, policy in policies.items():
            rate, seen[name] = _write(reading, policy, latency)
            if repetition:
                rates[name].append(rate)
    return [
        Result(name, latency, statistics.median(rate), (min(rate), max(rate)), **seen[name])
        for name, rate in rates.items()
    ]


def _write(reading: Reading, policy: Tiered, latency: float) -> tuple[float, dict]:
    """Tokens per second, and what else a ``Result`` tells of a run."""
    recorder, new = Recorder(), reading.new
    with reading.decoder(policy, recorder) as decoder:
        _add_latency(decoder, latency)
        state = decoder.begin(reading.logits, Greedy(), jax.random.key(0), new, ())
        began = time.perf_counter()
        state = decoder.advance(state, Greedy(), jax.random.key(0), new, ())
        elapsed = time.perf_counter() - began
    steps = recorder.steps
    return steps * len(reading.lengths) / elapsed, dict(
        hit_rate=1 - recorder.missed / max(recorder.chosen, 1),
        fetched_bytes=recorder.missed * decoder.store.shape.block_bytes / steps,
        disk_bytes=decoder.store.counts.disk_bytes_read / steps,
        seconds={stage: total / steps for stage, total in recorder.seconds.items()},
        tokens=state.tokens,
    )


def draw(reading: Reading, policy: Tiered, latency: float, layers: Sequence[int]) -> str:
    """The timeline of the last step of a run."""
    recorder, new = Recorder(events=[]), reading.new
    with reading.decoder(policy, recorder) as decoder:
        _add_latency(decoder, latency)
        state = decoder.begin(reading.logits, Greedy(), jax.random.key(0), new, ())
        decoder.advance(state, Greedy(), jax.random.key(0), new, ())
        recorder.settle()
    return picture(recorder.events, recorder.steps, layers)


def run(
    model: str,
    *,
    tokens: int,
    batch: int,
    new: int,
    budget: float | int,
    device_share: float,
    host_share: float,
    disk: str | None,
    latencies: Sequence[float],
    runs: int,
    dtype: str | None = None,
) -> list[Result]:
    """Reads a prompt, runs all variants with all latencies and prints what came of it.

    Args:
        model: What ``kvec_jax.load`` takes.
        tokens: Of each prompt.
        batch: Prompts, each another part of the text.
        new: Tokens to write.
        budget: As in ``Tiered``.
        device_share: Of the cache on the device, at most.
        host_share: Of the cache in host memory, at most.
        disk: Folder for the rest.
        latencies: Seconds added to every fetch.
        runs: Repetitions.
        dtype: Of weights and cache.

    Raises:
        ValueError, StoreError: For more tokens than the model can take, or tiers that can't be.
    """
    from rich.console import Console

    import kvec_jax as kv

    console = Console(width=140, highlight=False)
    lm = kv.load(model, dtype=dtype)
    if tokens + new > lm.config.max_position_embeddings:
        raise ValueError(
            f"tokens: {tokens} and {new} new ones are more than the model's {lm.config.max_position_embeddings}"
        )
    cache = lm.config.kv_bytes(tokens, lm.model.dtype.itemsize) * batch
    policy = Tiered(
        budget=budget,
        device_bytes=int(cache * device_share),
        host_bytes=None if disk is None else int(cache * host_share),
        disk=disk,
    )
    console.print(
        f"{model}, {lm.model.dtype}, {batch} x {tokens:,} tokens, {new} new; budget {budget}; "
        f"cache {cache / 1e6:,.0f} MB, at most {cache * device_share / 1e6:,.0f} MB on the device, "
        + (f"{cache * host_share / 1e6:,.0f} MB in memory, all on disk" if disk else "the rest in memory")
    )
    began = time.perf_counter()
    reading = Reading.of(lm.model, *_prompts(lm, tokens, batch), policy, new)
    console.print(f"read in {time.perf_counter() - began:.1f} s")
    results = []
    variants = VARIANTS | TURNS if batch > 1 else VARIANTS
    policies = {name: dataclasses.replace(policy, **changes) for name, changes in variants.items()}
    for latency in latencies:
        results += compare(reading, policies, latency, runs)
    console.print(table(results))
    for latency in dict.fromkeys((latencies[0], latencies[-1])):
        console.print(f"\nThe first layers of a step, {latency * 1e3:g} ms added to every fetch:")
        console.print(draw(reading, policy, latency, range(4)), markup=False)
    return results


def table(results: Sequence[Result]):
    """The results; ratios are to the first variant of the same latency."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    headings = (
        "latency ms|variant|tokens/s|slowest|fastest|of first|hits|to device MB|disk MB|step ms|select|fetch|stall"
    )
    for heading in headings.split("|"):
        shown.add_column(heading, justify="left" if heading == "variant" else "right", no_wrap=True)
    for result in results:
        first = next(other for other in results if other.latency == result.latency)
        stages = ("step", "wait for select", "fetch", "stall")
        shown.add_row(
            f"{result.latency * 1e3:g}",
            result.variant,
            f"{result.tokens_per_second:.2f}",
            *(f"{rate:.2f}" for rate in result.spread),
            f"{result.tokens_per_second / first.tokens_per_second:.2f}",
            f"{result.hit_rate:.1%}",
            f"{result.fetched_bytes / 1e6:.2f}",
            f"{result.disk_bytes / 1e6:.2f}",
            *(f"{result.seconds.get(stage, 0.0) * 1e3:.1f}" for stage in stages),
        )
    return shown


def _add_latency(decoder: TieredDecoder, seconds: float) -> None:
    fetch = decoder.store.fetch

    def slow(*arguments):
        time.sleep(seconds)
        return fetch(*arguments)

    decoder.store.fetch = slow if seconds else fetch


def _prompts(lm, tokens: int, batch: int) -> tuple[jax.Array, jax.Array]:
    """Parts of Python's language reference, int32 [batch, tokens], and their lengths."""
    from kvec_jax.demo import reference_text

    ids = lm.tokenizer.encode(reference_text()[: 8 * tokens * batch])
    ids = np.resize(np.asarray(ids, np.int32), (batch, tokens))
    return jnp.asarray(ids), jnp.full((batch,), tokens, jnp.int32)
