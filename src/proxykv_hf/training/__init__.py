"""What mappers are trained on and how: the corpus of documents, and a teacher's scores of them on disk."""
