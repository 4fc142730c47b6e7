"""All tasks by name: seeded, offline, of any length."""

from __future__ import annotations

from . import counting, dialogue, documents, few_shot, function, key_value, many_questions, niah, passages, tracking

#: RULER's 13 tasks in RULER's order, then the tasks with several questions about one context.
TASKS = {
    task.name: task
    for task in (
        *niah.tasks(),
        tracking.TASK,
        *counting.TASKS,
        *documents.TASKS,
        key_value.TASK,
        many_questions.TASK,
        passages.TASK,
        few_shot.TASK,
        dialogue.TASK,
        function.TASK,
    )
}
