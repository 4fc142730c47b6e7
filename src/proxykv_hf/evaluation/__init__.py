"""What is lost at each budget: tasks, metrics, one runner, the report."""
