"""Loads a mapper and its proxy, and checks that both fit each other and the target."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from .._compat import set_attention_name
from ..attention.lease import own_attention_name
from ..errors import InvalidInputError, ProxyKVError, ProxyKVWarning, UnsupportedModelError
from ..geometry import ModelGeometry, are_other_weights, check_geometry, check_loaded, device_of
from .lane import usable_device
from .mapper import HybridAxialMapper

#: The ``proxy_id`` of a mapper whose proxy is the target's own first layers, which share the target's parameters.
SELF_PROXY = "target"


def load_proxy(
    mapper: str | Path | HybridAxialMapper,
    *,
    target: PreTrainedModel,
    proxy: str | Path | PreTrainedModel | None,
    revision: str | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> tuple[PreTrainedModel, HybridAxialMapper, PreTrainedTokenizerBase | None]:
    """Load what a mapper describes: the proxy, cut to its first layers, the mapper, and the proxy's tokenizer.

    The tokenizer is None if the proxy is given as a model, or is the target's own first layers.

    See `ProxyScorer.from_pretrained` for the arguments and errors.
    """
    check_loaded(target)
    device = device_of(target) if device is None else usable_device(device)
    dtype = target.dtype if dtype is None else dtype
    loaded = mapper if isinstance(mapper, HybridAxialMapper) else load_mapper(mapper, revision)
    config = loaded.config
    check_target(loaded, ModelGeometry.from_config(target.config))
    tokenizer: PreTrainedTokenizerBase | None = None
    layers = config.feature_recipe.proxy_layers
    small: PreTrainedModel
    if isinstance(proxy, PreTrainedModel):
        small = cast(PreTrainedModel, proxy.base_model)
        if small.config.get_text_config(decoder=True).num_hidden_layers != layers:
            check_proxy(loaded, ModelGeometry.from_config(proxy.config))
            small = first_layers(proxy, layers)
    elif proxy is None and config.proxy_id == SELF_PROXY:
        small = first_layers(target, layers)
    else:
        source, at = (str(config.proxy_id), config.proxy_revision) if proxy is None else (str(proxy), None)
        check_proxy(loaded, ModelGeometry.from_config(AutoConfig.from_pretrained(source, revision=at or "main")))
        small = load_first_layers(source, layers, revision=at, dtype=dtype, device=device)
        tokenizer = AutoTokenizer.from_pretrained(source, revision=at or "main")
    for what, model, expected in (("target", target, config.target_weights), ("proxy", small, config.proxy_weights)):
        if are_other_weights(model, expected):
            warnings.warn(
                f"the mapper was trained with other weights of the {what} (another fine-tune or quantization of the "
                f"same geometry, or the same weights in another dtype than {model.dtype}): it may score a little worse",
                ProxyKVWarning,
                stacklevel=4,
            )
    place = device_of(small)
    if loaded is mapper and (loaded.training or (loaded.device, loaded.dtype) != (place, torch.float32)):
        loaded = copy.deepcopy(loaded)  # `to` and `eval` would change the caller's mapper
    nn.Module.to(loaded, device=place, dtype=torch.float32).eval()
    return small, loaded, tokenizer


def check_target(mapper: HybridAxialMapper, geometry: ModelGeometry) -> None:
    """Refuse a mapper that was trained for a target of another geometry.

    Raises:
        GeometryError: The geometries differ. The error names the differences.
    """
    trained = f"the mapper was trained for {mapper.config.target_id}, another target than this"
    check_geometry(mapper.config.target, geometry, trained)


def check_proxy(mapper: HybridAxialMapper, geometry: ModelGeometry) -> None:
    """Refuse a mapper that was trained for a proxy of another geometry. This is the geometry of the whole proxy.

    Raises:
        GeometryError: The geometries differ. The error names the differences.
    """
    trained = f"the mapper was trained for {mapper.config.proxy_id}, another proxy than this"
    check_geometry(mapper.config.proxy, geometry, trained)


def load_mapper(source: str | Path, revision: str | None = None) -> HybridAxialMapper:
    """Load a mapper from a folder or the Hub. Only safetensors files are read.

    Raises:
        InvalidInputError: There is no mapper, or none in safetensors, or it is damaged: a file is cut short, or
            weights and config do not belong together.
    """
    try:
        config = PreTrainedConfig.get_config_dict(source, revision=revision)[0]
        if config and config.get("model_type") != HybridAxialMapper.config_class.model_type:
            raise InvalidInputError(
                f"expected a mapper, but {source} holds a {config.get('model_type')}: give a mapper's folder or id"
            )
        if not config:
            raise OSError("there is no config.json")
        loaded: Any = HybridAxialMapper.from_pretrained(
            source,
            revision=revision or "main",
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, with what transformers would only log
            output_loading_info=True,
        )
        mapper: HybridAxialMapper = loaded[0]
        loading: dict[str, Any] = loaded[1]
        for part in ("proxy", "feature_recipe"):  # otherwise read only when they are used
            getattr(mapper.config, part)
    except ProxyKVError:
        raise
    except OSError as error:
        where = "" if Path(source).is_dir() else f" (there is no such folder in {Path.cwd()})"
        raise InvalidInputError(
            "expected a folder or Hub id that holds a mapper (config.json and model.safetensors), got "
            f"{source}{where}: {str(error).splitlines()[0]}"
        ) from error
    except (SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"expected a mapper, but the one in {source} is damaged ({error}): download it again"
        ) from error
    wrong = {
        "missing": loading["missing_keys"],
        "unknown": loading["unexpected_keys"],
        "of another size": [name for name, *_ in loading["mismatched_keys"]],
    }
    if told := "; ".join(f"{what}: {', '.join(sorted(names))}" for what, names in wrong.items() if names):
        raise InvalidInputError(
            f"expected the weights that config.json in {source} describes, but model.safetensors differs ({told}): "
            "download both files again"
        )
    return mapper


def _cut(config: PreTrainedConfig, layers: int) -> Any:
    """A copy of a decoder's config, cut to its first ``layers`` layers."""
    decoder = copy.deepcopy(config.get_text_config(decoder=True))
    if layers > decoder.num_hidden_layers:
        raise InvalidInputError(
            f"expected a proxy of at least {layers} layers, which the mapper reads, got one of "
            f"{decoder.num_hidden_layers}: use the proxy that the mapper was trained for"
        )
    decoder.num_hidden_layers = layers
    if getattr(decoder, "layer_types", None) is not None:
        decoder.layer_types = decoder.layer_types[:layers]
    return decoder


def load_first_layers(
    source: str, layers: int, *, revision: str | None, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Load the first layers of a model on disk or the Hub, without its language-model head. The rest is not loaded.

    Raises:
        InvalidInputError: The model has fewer layers, or its files lack some weights of these layers.
    """
    config = _cut(AutoConfig.from_pretrained(source, revision=revision or "main"), layers)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # do not warn that the other layers' weights are unused
    try:
        model, loading = AutoModel.from_pretrained(
            source, revision=revision or "main", config=config, dtype=dtype, output_loading_info=True
        )
    finally:
        logging.set_verbosity(verbosity)
    if missing := loading["missing_keys"]:
        raise InvalidInputError(
            f"expected a proxy with all weights of its first {layers} layers, but {source} lacks "
            f"{', '.join(sorted(missing))}: download it again"
        )
    return cast(PreTrainedModel, nn.Module.to(model, device).eval())


def first_layers(target: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A decoder of the target's first layers, with modules of its own and the target's parameters.

    Raises:
        UnsupportedModelError: The parameters of these layers are not plain tensors on one device.
    """
    config = _cut(target.config, layers)
    set_attention_name(config, own_attention_name(config))  # the target's is replaced while a cache is open
    with init_empty_weights(include_buffers=False):  # buffers (of rotary embeddings) are small
        model = AutoModel.from_config(config)
    wanted = set(model.state_dict())
    shared = {
        name: tensor
        for name, tensor in target.base_model.named_parameters()
        if name in wanted and tensor.is_floating_point()
    }
    trained = {name: tensor.requires_grad for name, tensor in shared.items()}
    model.load_state_dict(shared, strict=False, assign=True)
    for name, tensor in shared.items():  # load_state_dict has set it as in the new module
        tensor.requires_grad_(trained[name])
    places = {parameter.device for parameter in model.parameters()}
    if len(places) > 1 or torch.device("meta") in places:
        raise UnsupportedModelError(
            f"expected the first {layers} layers of {type(target).__name__}, which are to be the proxy, as plain "
            "weights on one device: they are wrapped (merge an adapter such as LoRA first), quantized, offloaded, or "
            "on several devices; or use a mapper whose proxy is another model"
        )
    for module in model.modules():  # `module.to` would move the target's own parameters too
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(*places))
    return cast(PreTrainedModel, model.eval())
