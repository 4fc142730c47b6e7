"""The proxy, a small model that reads the prompt, and the mapper that turns its features into scores."""
