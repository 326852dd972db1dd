"""kvec_jax: key-value cache compression for long-context language models, in JAX."""

from kvec_jax.cache import CompressedKV as CompressedKV
from kvec_jax.cache import coverage as coverage
from kvec_jax.context_file import load_context as load_context
from kvec_jax.contexts import Context as Context
from kvec_jax.errors import KvecError as KvecError
from kvec_jax.errors import LoadError as LoadError
from kvec_jax.errors import UnsupportedError as UnsupportedError
from kvec_jax.extend import extend as extend
from kvec_jax.generate import decode as decode
from kvec_jax.generate import generate as generate
from kvec_jax.implementations import Implementations as Implementations
from kvec_jax.models.config import ModelConfig as ModelConfig
from kvec_jax.models.transformer import Transformer as Transformer
from kvec_jax.policies import CAKE as CAKE
from kvec_jax.policies import TOVA as TOVA
from kvec_jax.policies import AdaKV as AdaKV
from kvec_jax.policies import CompressKV as CompressKV
from kvec_jax.policies import CriticalAdaKV as CriticalAdaKV
from kvec_jax.policies import CriticalKV as CriticalKV
from kvec_jax.policies import Even as Even
from kvec_jax.policies import ExpectedAttention as ExpectedAttention
from kvec_jax.policies import FullCache as FullCache
from kvec_jax.policies import KeyDiff as KeyDiff
from kvec_jax.policies import KNorm as KNorm
from kvec_jax.policies import KVec as KVec
from kvec_jax.policies import LaProx as LaProx
from kvec_jax.policies import Observation as Observation
from kvec_jax.policies import ObservedAttention as ObservedAttention
from kvec_jax.policies import PerLayer as PerLayer
from kvec_jax.policies import Policy as Policy
from kvec_jax.policies import Pyramid as Pyramid
from kvec_jax.policies import PyramidKV as PyramidKV
from kvec_jax.policies import Random as Random
from kvec_jax.policies import Scores as Scores
from kvec_jax.policies import SnapKV as SnapKV
from kvec_jax.policies import Stateless as Stateless
from kvec_jax.policies import StreamingLLM as StreamingLLM
from kvec_jax.policies import Weighted as Weighted
from kvec_jax.policies import WindowAttention as WindowAttention
from kvec_jax.policies.registry import register as _register
from kvec_jax.prefill import prefill as prefill
from kvec_jax.quantised import quantise as quantise
from kvec_jax.sampling import Greedy as Greedy
from kvec_jax.sampling import Sample as Sample
from kvec_jax.sekv.policy import SeKV as SeKV
from kvec_jax.session import LanguageModel as LanguageModel
from kvec_jax.session import Output as Output
from kvec_jax.session import load as load
from kvec_jax.spread import shard as shard
from kvec_jax.sweep import sweep as sweep
from kvec_jax.tiers.policy import Tiered as Tiered

_register("sekv", SeKV)
_register("tiered", Tiered)

__version__ = "0.1.0"
