"""Two small folders of made-up text files, enough for both sides of a corpus."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

WORDS = "river stone market letter window morning garden paper winter bridge music silver number branch".split()


def write_texts(root: Path, files: int = 30) -> list[Path]:
    """Write the folders ``essays`` (.md, some of them .gz) and ``code`` (.py in a subfolder)."""
    rng = random.Random(0)
    for number in range(files):
        text = "\n".join(" ".join(rng.choices(WORDS, k=9)) + f" {number}." for _ in range(30))
        essay = root / "essays" / f"essay-{number}.md"
        code = root / "code" / "package" / f"module_{number}.py"
        for path in (essay, code):
            path.parent.mkdir(parents=True, exist_ok=True)
        if number % 3:
            essay.write_text(text)
        else:
            essay.with_suffix(".md.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        code.write_text("\n".join(f"{rng.choice(WORDS)}_{line} = {rng.random()}" for line in range(60)))
    return [root / "essays", root / "code"]
