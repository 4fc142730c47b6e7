"""What mappers are trained on and how: a corpus, a teacher's scores of it on disk, the hybrid loss and the loop."""
