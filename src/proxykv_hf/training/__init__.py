"""Training of mappers: the corpus, the teacher's scores of it on disk, the hybrid loss and the training loop."""
