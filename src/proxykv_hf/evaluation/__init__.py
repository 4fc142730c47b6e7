"""The evaluation, which shows what is lost at each budget: tasks, metrics, a runner, a report."""
