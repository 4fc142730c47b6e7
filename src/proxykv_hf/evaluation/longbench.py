"""LongBench's English data sets: prompt, longest answer and metric of each (arXiv 2308.14508).

The prompts are LongBench's own (github.com/THUDM/LongBench, MIT licence), so that figures can be compared. The document
and the text before it are the context; the text after it is the question.
"""

from __future__ import annotations

from dataclasses import dataclass

_STORY = "the story as concisely as you can, using a single phrase if possible. Do not provide any explanation."
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.'
)
_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)


@dataclass(frozen=True)
class DataSet:
    """One data set of LongBench.

    Args:
        before: The text before the document.
        after: The text after the document; ``{input}`` is the question in the line.
        metric: A name in `metrics.METRICS`.
        max_new_tokens: The length of the longest answer.
    """

    before: str
    after: str
    metric: str
    max_new_tokens: int


_MULTI_HOP = DataSet(
    f"{_PASSAGES}\n\nThe following are given passages.\n",
    f"\n\n{_PASSAGES}\n\nQuestion: {{input}}\nAnswer:",
    "f1",
    32,
)
DATA_SETS = {
    "narrativeqa": DataSet(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question as "
        "concisely as you can, using a single phrase if possible. Do not provide any explanation.\n\nStory: ",
        f"\n\nNow, answer the question based on {_STORY}\n\nQuestion: {{input}}\n\nAnswer:",
        "f1",
        128,
    ),
    "qasper": DataSet(
        f"You are given a scientific article and a question. Answer the question {_ARTICLE}\n\nArticle: ",
        f"\n\n Answer the question based on the above article {_ARTICLE}\n\nQuestion: {{input}}\n\nAnswer:",
        "f1",
        128,
    ),
    "multifieldqa_en": DataSet(
        "Read the following text and answer briefly.\n\n",
        "\n\nNow, answer the following question based on the above text, only give me the answer and do not output any "
        "other words.\n\nQuestion: {input}\nAnswer:",
        "f1",
        64,
    ),
    "hotpotqa": _MULTI_HOP,
    "2wikimqa": _MULTI_HOP,
    "musique": _MULTI_HOP,
    "gov_report": DataSet(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n",
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
        "rouge_l",
        512,
    ),
    "qmsum": DataSet(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n",
        "\n\nNow, answer the query based on the above meeting transcript in one or more sentences.\n\nQuery: {input}\n"
        "Answer:",
        "rouge_l",
        512,
    ),
    "multi_news": DataSet(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n",
        "\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        "rouge_l",
        512,
    ),
    "trec": DataSet(
        "Please determine the type of the question below. Here are some examples of questions.\n\n",
        "\n{input}",
        "classification",
        64,
    ),
    "triviaqa": DataSet(
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n",
        "\n\n{input}",
        "f1_first_line",
        32,
    ),
    "samsum": DataSet(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n",
        "\n\n{input}",
        "rouge_l_first_line",
        128,
    ),
    "passage_count": DataSet(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n",
        "\n\nPlease enter the final count of unique paragraphs after removing duplicates. The output format should "
        "only contain the number, such as 1, 2, 3, and so on.\n\nThe final answer is: ",
        "count",
        32,
    ),
    "passage_retrieval_en": DataSet(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n",
        "\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph that the abstract is "
        'from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
        "retrieval",
        32,
    ),
    "lcc": DataSet("Please complete the code given below. \n", "Next line of code:\n", "edit_similarity", 64),
    "repobench-p": DataSet(
        "Please complete the code given below. \n", "{input}Next line of code:\n", "edit_similarity", 64
    ),
}
