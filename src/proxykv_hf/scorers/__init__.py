"""Ways to rate KV pairs, one file each; `base` says what a scorer is."""
