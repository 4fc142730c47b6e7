"""A drop-in, truly smaller KV cache for Hugging Face transformers."""

from .cache import ProxyPrunedCache
from .dynamic import prune_dynamic_cache
from .errors import (
    CacheStateError,
    GeometryError,
    InvalidInputError,
    InvalidPolicyError,
    ProxyKVError,
    ProxyKVWarning,
    ScoringError,
    UnsupportedModelError,
)
from .geometry import ModelGeometry
from .report import CacheReport
from .retention import RetentionPolicy
from .scorers.base import Observation, Scorer, ScorerRun, ScoringRequest, WholeCache
from .scorers.fixed import FixedScorer
from .scorers.kvzip import KVzipScorer
from .scorers.random import RandomScorer
from .scorers.snapkv import SnapKVScorer

__version__ = "0.1.0"

__all__ = [
    "CacheReport",
    "CacheStateError",
    "FixedScorer",
    "GeometryError",
    "InvalidInputError",
    "InvalidPolicyError",
    "KVzipScorer",
    "ModelGeometry",
    "Observation",
    "ProxyKVError",
    "ProxyKVWarning",
    "ProxyPrunedCache",
    "RandomScorer",
    "RetentionPolicy",
    "Scorer",
    "ScorerRun",
    "ScoringError",
    "ScoringRequest",
    "SnapKVScorer",
    "UnsupportedModelError",
    "WholeCache",
    "prune_dynamic_cache",
]
