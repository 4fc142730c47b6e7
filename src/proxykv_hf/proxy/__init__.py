"""The small model that scores, and the mapper of what it sees."""
