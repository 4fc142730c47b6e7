"""Read a teacher's documents through a pair's proxy: the file that ``train_mapper.py`` trains on.

    python examples/extract_features.py --pair smollm2 --teacher teacher/smollm2-135m --out features.pt

``--teacher`` is what ``proxykv teacher`` wrote, one folder or several. The file holds ``documents`` (name to
``x`` `[C, n]` features and ``y`` `[L, H, n]` KVzip scores, both float16) and ``config``, what a mapper's config
says of the two models.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from models import MODELS, load, resolve
from pairs import PAIRS
from tqdm import tqdm
from transformers import AutoConfig

from proxykv_hf import FeatureRecipe, ModelGeometry
from proxykv_hf.features import proxy_features
from proxykv_hf.geometry import weights_fingerprint
from proxykv_hf.pretrained import SELF_PROXY, first_layers, load_first_layers
from proxykv_hf.reconstruction import RECIPE
from proxykv_hf.training.shards import load_shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=sorted(PAIRS), required=True)
    parser.add_argument("--teacher", type=Path, required=True, nargs="+", metavar="FOLDER", help="of teacher shards")
    parser.add_argument("--sources", nargs="+", default=["attention", "hidden"])
    parser.add_argument("--proxy-layers", type=int, required=True)
    parser.add_argument("--hidden-layers", type=int, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    recipe = FeatureRecipe(tuple(arguments.sources), arguments.proxy_layers, tuple(arguments.hidden_layers))
    pair = PAIRS[arguments.pair]
    target, _ = load(pair.target)
    whole = target.config
    if pair.proxy is None:
        proxy = first_layers(target, recipe.proxy_layers)
    else:
        folder = str(resolve(pair.proxy))
        whole = AutoConfig.from_pretrained(folder)
        proxy = load_first_layers(folder, recipe.proxy_layers, revision=None, dtype=target.dtype, device=target.device)
    geometry, weights = ModelGeometry.from_config(target.config), weights_fingerprint(target)
    config = {
        "target_geometry": geometry.to_dict(),
        "proxy_geometry": ModelGeometry.from_config(whole).to_dict(),
        "target_id": MODELS[pair.target].hub_id,
        "proxy_id": SELF_PROXY if pair.proxy is None else MODELS[pair.proxy].hub_id,
        "target_weights": weights,
        "proxy_weights": weights_fingerprint(proxy),
        "features": recipe.to_dict(),
        "channels": recipe.channels(proxy.config),
        "score_recipe": RECIPE,
    }
    del target
    documents = {}
    for folder in arguments.teacher:
        shards = load_shards(folder, geometry=geometry, weights=weights, score_recipe=RECIPE)
        for document in tqdm(shards, desc=f"documents of {folder}"):
            features = proxy_features(proxy, document.input_ids.long(), recipe)[:, document.prefix_tokens :]
            documents[f"{folder}/{document.name}"] = {
                "x": features.half().cpu(),
                "y": document.scores,
                "held_out": document.split == "held_out",
            }
    torch.save({"config": config, "documents": documents}, arguments.out)


if __name__ == "__main__":
    main()
