"""Seconds and bytes of ways to prefill, prune and decode."""
