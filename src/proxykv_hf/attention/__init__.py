"""A model's attention: how it is replaced, read, and computed again."""
