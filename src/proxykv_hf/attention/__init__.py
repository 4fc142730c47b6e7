"""A model's attention: how it is taken over, read and repeated."""
