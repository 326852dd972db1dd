"""``Tiered``: what a user says about a cache that is spread over tiers."""

import dataclasses
import os
from collections.abc import Callable
from typing import Literal

from kvec_jax.arguments import check_choice, check_count, check_flag, check_number
from kvec_jax.forms import Driven
from kvec_jax.policies.base import Policy
from kvec_jax.policies.budgets import Even


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiered(Driven):
    """Keeps everything, but little of it on the device: each step fetches the blocks that matter to it (KVDrive).

    The design of https://arxiv.org/abs/2605.18071, rebuilt from its abstract and from descriptions by others. A
    block is ``block_tokens`` tokens of one key-value head. Each step scores all blocks of a head by their mean keys
    (softmax of query times mean key, summed over the head's query heads), and attends to the best, to the first
    ``sinks`` tokens and to the last ``recent`` ones. The device keeps the blocks that were chosen lately; those
    that it lacks come from host memory or disk while it attends to those it has, and the two parts are merged by their
    log-sum-exps. Generation is **not** the full cache's unless ``budget=1.0``.

    Choices where the paper is silent: a step attends to what it chose and not to what happens to be on the device, so
    tiers never change results; a block that was not chosen is worth its index score of the same step; sinks and recent
    tokens stay on the device, beside ``device_bytes``, and so does the index. Local (sliding window) layers keep their
    window on the device.

    Args:
        budget: Share of a head's blocks that a step attends to, a float in (0, 1], or tokens, an int; at least a block.
            Sinks and recent tokens come on top.
        device_bytes: Of the blocks on the device, for the whole batch; by default three times what a step chooses.
        host_bytes: Of the blocks in host memory; by default all of them.
        disk: Folder for a scratch file that takes all blocks; needed where memory doesn't hold them.
        disk_bytes: Most bytes on disk; by default as many as there is room for.
        backend: How the disk is read: ``"direct"`` past the page cache (``stats`` say where the file system refuses),
            or ``"mmap"``.
        block_tokens: P.
        index: ``"mean"``: a block is P consecutive tokens. ``"clusters"``: tokens with similar keys are first brought
            together, by k-means within segments of 8,192 tokens.
        eviction: Which blocks leave the device: ``"lookahead"``, those of least index score in the current step, or
            ``"lru"``, those not chosen for longest.
        profile: File of ``kvec calibrate --tiers``: how ``device_bytes`` are divided over layers and heads; evenly by
            default.
        policy: What to keep of the prompt in the first place; everything by default. With a policy, what it keeps of
            all layers is on the device at once, while the prompt is read.
        sinks: Tokens at the beginning that always stay on the device.
        recent: Tokens at the end that always stay on the device.
        flush: After how many generated tokens the older ones become blocks.
        deterministic: Attend once everything is there, in one order: results are the same to the bit for any tiers,
            sizes, eviction and number of threads.
        overlap: Attend to what is on the device while the rest is fetched; ``False`` is for comparison.
        micro_batches: Parts of the batch that take turns, so that one's fetch overlaps another's computation; each
            reads all weights. By default 2 from four rows up, but on a CPU 1, where that costs more than it hides.
        hints: Blocks per head, the next best after those chosen, that are brought from disk into memory in the
            background.
        threads: That read the disk.
        timeout: Seconds after which a wait for a tier is an error.
        progress: Called as ``progress(what, done, total)``.

    Raises:
        TypeError, ValueError: For settings that make no sense.

    Example:
        >>> Tiered(device_bytes=1 << 26, host_bytes=1 << 28, disk="/tmp").reads
        'direct'
    """

    budget: float | int = 0.0625
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk: str | None = None
    disk_bytes: int | None = None
    backend: Literal["direct", "mmap"] = "direct"
    block_tokens: int = 8
    index: Literal["mean", "clusters"] = "mean"
    eviction: Literal["lookahead", "lru"] = "lookahead"
    profile: str | None = None
    policy: Policy | None = None
    sinks: int = 4
    recent: int = 64
    flush: int = 1024
    deterministic: bool = False
    overlap: bool = True
    micro_batches: int | None = None
    hints: int = 0
    threads: int = 4
    timeout: float = 60.0
    progress: Callable[[str, int, int], None] | None = None
    name: str = "tiered"

    def __post_init__(self):
        Even(self.budget)  # its checks: a positive int, or a float share
        for name, low in (("block_tokens", 1), ("sinks", 0), ("recent", 1), ("flush", 1), ("hints", 0), ("threads", 1)):
            check_count(name, getattr(self, name), low)
        for name in ("device_bytes", "host_bytes", "disk_bytes", "micro_batches"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1 if name == "micro_batches" else 0)
        check_choice("backend", self.backend, ("direct", "mmap"))
        check_choice("index", self.index, ("mean", "clusters"))
        check_choice("eviction", self.eviction, ("lookahead", "lru"))
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise TypeError(f"policy: expected a Policy such as kvec_jax.LaProx(0.5), got {self.policy!r}")
        for name in ("disk", "profile"):
            value = getattr(self, name)
            if not isinstance(value, str | os.PathLike | None):
                raise TypeError(f"{name}: expected a path, got {value!r}")
            if value is not None:
                object.__setattr__(self, name, os.fspath(value))
        if self.disk is None and self.disk_bytes is not None:
            raise ValueError(f"disk_bytes: expected a folder as disk too, got {self.disk_bytes} bytes of none")
        for name in ("deterministic", "overlap"):
            check_flag(name, getattr(self, name))
        if self.flush < self.block_tokens:
            raise ValueError(f"flush: expected at least a block of {self.block_tokens} tokens, got {self.flush}")
        check_number("timeout", self.timeout, 0, above=True)

    @property
    def reads(self) -> str:
        """Where blocks beyond the device come from: ``"ram"``, or how the disk is read."""
        return "ram" if self.disk is None else self.backend

    def write_text(self, lm, tokens, lengths, **settings) -> list:
        """See ``Driven``."""
        from kvec_jax.tiers import text

        return text.write_text(lm, self, tokens, lengths, **settings)
