"""The cache, and what it keeps of a prompt."""
