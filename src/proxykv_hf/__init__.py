"""A drop-in, truly smaller KV cache for Hugging Face transformers."""

from .cache.cache import ProxyPrunedCache
from .cache.dynamic import prune_dynamic_cache
from .cache.report import CacheReport
from .cache.retention import RetentionPolicy
from .errors import (
    CacheStateError,
    GeometryError,
    InvalidInputError,
    InvalidPolicyError,
    ProxyKVError,
    ProxyKVWarning,
    ScoringError,
    ShardError,
    UnsupportedModelError,
)
from .generation import ProxyKVConfig, ProxyKVGenerationMixin, with_proxykv
from .geometry import ModelGeometry
from .proxy.features import FeatureRecipe
from .proxy.mapper import HybridAxialMapper, HybridAxialMapperConfig
from .scorers.base import Observation, Scorer, ScorerRun, ScoringRequest, WholeCache
from .scorers.expected_attention import ExpectedAttentionScorer
from .scorers.fixed import FixedScorer
from .scorers.h2o import H2OScorer
from .scorers.head_prior import HeadPriorScorer
from .scorers.hidden_state import HiddenStateHeads, HiddenStateScorer
from .scorers.kvzip import KVzipScorer
from .scorers.proxy import ProxyScorer
from .scorers.random import RandomScorer
from .scorers.snapkv import SnapKVScorer
from .scorers.static_alignment import StaticAlignmentScorer
from .scorers.streaming_llm import StreamingLLMScorer

__version__ = "0.1.0"

__all__ = [
    "CacheReport",
    "CacheStateError",
    "ExpectedAttentionScorer",
    "FeatureRecipe",
    "FixedScorer",
    "GeometryError",
    "H2OScorer",
    "HeadPriorScorer",
    "HiddenStateHeads",
    "HiddenStateScorer",
    "HybridAxialMapper",
    "HybridAxialMapperConfig",
    "InvalidInputError",
    "InvalidPolicyError",
    "KVzipScorer",
    "ModelGeometry",
    "Observation",
    "ProxyKVConfig",
    "ProxyKVError",
    "ProxyKVGenerationMixin",
    "ProxyKVWarning",
    "ProxyPrunedCache",
    "ProxyScorer",
    "RandomScorer",
    "RetentionPolicy",
    "Scorer",
    "ScorerRun",
    "ScoringError",
    "ScoringRequest",
    "ShardError",
    "SnapKVScorer",
    "StaticAlignmentScorer",
    "StreamingLLMScorer",
    "UnsupportedModelError",
    "WholeCache",
    "prune_dynamic_cache",
    "with_proxykv",
]
