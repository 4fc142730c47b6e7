"""The scorers, which rate KV pairs: one file for each. `base` defines what a scorer is."""
