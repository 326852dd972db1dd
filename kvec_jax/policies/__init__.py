"""Eviction policies: scorers, scopes, budgets, and the named methods made of them."""

from kvec_jax.policies.base import Observation as Observation
from kvec_jax.policies.base import Policy as Policy
from kvec_jax.policies.base import Stateless as Stateless
from kvec_jax.policies.budgets import Even as Even
from kvec_jax.policies.registry import get as get
from kvec_jax.policies.registry import names as names
from kvec_jax.policies.registry import register as register
from kvec_jax.policies.snapkv import SnapKV as SnapKV
from kvec_jax.policies.snapkv import WindowAttention as WindowAttention
from kvec_jax.policies.streaming import FullCache as FullCache
from kvec_jax.policies.streaming import Recency as Recency
from kvec_jax.policies.streaming import StreamingLLM as StreamingLLM
