"""A mapper's card for the Hub: what it is, how it was trained, how well it scores, and what its limits are."""

from __future__ import annotations

import re
from collections.abc import Mapping

from huggingface_hub import ModelCard, ModelCardData

from .loading import SELF_PROXY
from .mapper import HybridAxialMapper

RATIOS = ("0.1", "0.2", "0.3", "0.5")

TEXT = """# {title}

A proxykv-hf mapper: it turns what `{proxy}` sees in a prompt into
a score for every KV head of `{target}`, so that the large model's KV cache can be cut to its best share
while it prefills. A HybridAxialMapper of ProxyKV (arXiv 2605.16360), trained on KVzip's scores
(arXiv 2505.23416).

```python
cache = ProxyPrunedCache.from_pretrained(
    "{folder}",
    target=model,
    tokenizer=tokenizer,
    retention_ratio=0.2,
)
with_proxykv(model).generate(**inputs, cache=cache)
```

| | |
|---|---|
| reads | {features} |
| parameters | {parameters:,} ({megabytes:.1f} MB in float32) |
| multiply-adds a token | {operations:,.0f} ({flops:,.0f} FLOPs) |
| training | {training} |
| score recipe | {recipe} |
| weights it was trained with | target {target_weights}, proxy {proxy_weights} (fingerprints) |

## Agreement with KVzip

Share of KVzip's kept KV pairs that the mapper keeps too, mean over held-out documents ({held_out}).
*Head prior* is each head's mean training score, blind to the text.

| | {header} |
|---|{rule}|
{rows}

## Limits

{limits}
"""


def mapper_card(
    mapper: HybridAxialMapper,
    *,
    title: str,
    folder: str,
    agreement: Mapping[str, Mapping[str, float]],
    held_out: str,
    limits: str,
    licence: str = "apache-2.0",
) -> ModelCard:
    """The card of a trained mapper.

    Args:
        mapper: The mapper. The ``training`` of its config holds the sentence ``summary``.
        title: The mapper's name.
        folder: The mapper's folder, for the example.
        agreement: The rows of the table: by name, the agreement with KVzip by ratio (``"0.1"``, …).
        held_out: What the agreement was measured on.
        limits: The limits that a user must know.
        licence: The licence's SPDX id in lower case.
    """
    config = mapper.config
    recipe = config.feature_recipe
    sources = (
        [f"hidden states after layers {', '.join(map(str, recipe.hidden_layers))}"] if recipe.hidden_layers else []
    )
    sources += [source for source in recipe.sources if source != "hidden"]
    parameters = sum(parameter.numel() for parameter in mapper.parameters())
    proxy = f"the first {recipe.proxy_layers} layers of " + (
        "the target itself" if config.proxy_id == SELF_PROXY else str(config.proxy_id)
    )
    text = TEXT.format(
        title=title,
        folder=folder,
        proxy=proxy,
        target=config.target_id,
        features=f"{' and '.join(sources)} of {proxy}: {config.channels} channels",
        parameters=parameters,
        megabytes=parameters * 4 / 1e6,
        operations=operations_per_token(mapper),
        flops=2 * operations_per_token(mapper),
        training=(config.training or {}).get("summary", "not recorded"),
        recipe=config.score_recipe,
        target_weights=config.target_weights,
        proxy_weights=config.proxy_weights,
        held_out=held_out,
        header=" | ".join(RATIOS),
        rule="|".join("---" for _ in RATIOS),
        rows="\n".join(
            f"| {name} | {' | '.join(f'{values[ratio]:.2f}' for ratio in RATIOS)} |"
            for name, values in agreement.items()
        ),
        limits=limits,
    )
    data = ModelCardData(
        license=licence,
        library_name="proxykv-hf",
        tags=["kv-cache", "proxykv", "kvzip"],
        base_model=None if config.target_id is None else [config.target_id],
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def card_on_hub(card: str, repo: str) -> str:
    """The card with an example that loads the mapper from the Hub, instead of from where it was when the card was made.

    The names of other models that the card loads stay the same.
    """
    return re.sub(r'(ProxyPrunedCache\.from_pretrained\(\s*)"[^"]*"', lambda found: f'{found[1]}"{repo}"', card)


def operations_per_token(mapper: HybridAxialMapper) -> float:
    """Multiply-adds of one time step, including the encoder's attention within a full window."""
    config = mapper.config
    heads = mapper.heads.bias.numel()
    size = config.head_tokens * config.width
    stem = config.channels * config.bottleneck + config.bottleneck * size * config.kernel_size
    block = 8 * config.width**2 + 2 * config.window * config.width
    cross = 2 * config.head_tokens * (config.width**2 + heads * config.width)
    return stem + config.head_tokens * config.encoder_layers * block + cross + heads * config.bottleneck
