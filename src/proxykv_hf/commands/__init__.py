"""The commands of ``proxykv``, one module for each; `cli` runs them."""
