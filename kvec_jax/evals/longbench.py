"""LongBench's 16 English sets (https://arxiv.org/abs/2308.14508): how each is asked and scored.

Metrics and lengths of answers are those of the benchmark; the requests are worded anew, so that scores may differ a
little from published ones.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Set:
    """A set of LongBench.

    Attributes:
        before: What stands before the context.
        request: What comes after it, with the row's own ``{input}``.
        metric: Name of a metric.
        max_new_tokens: Longest answer.
        answer_prefix: How the answer begins.
        first_line: Whether only the first line of an answer counts.
        chat: Whether the prompt goes through the chat template; examples to be continued and code don't.
    """

    before: str
    request: str
    metric: str
    max_new_tokens: int
    answer_prefix: str = ""
    first_line: bool = False
    chat: bool = True


_BRIEFLY = "Answer with as few words as you can, and nothing else."


def _passages(new: int) -> Set:
    return Set(
        before="Read these passages.",
        request="Using the passages, answer this question. " + _BRIEFLY + "\n\nQuestion: {input}",
        metric="qa_f1",
        max_new_tokens=new,
    )


def _summary(before: str, request: str) -> Set:
    return Set(before=before, request=request, metric="rouge_l", max_new_tokens=512)


SETS = {
    "narrativeqa": Set(
        before="Read this story, a book or the script of a film.",
        request="Answer this question about the story. " + _BRIEFLY + "\n\nQuestion: {input}",
        metric="qa_f1",
        max_new_tokens=128,
    ),
    "qasper": Set(
        before="Read this scientific article.",
        request='Answer this question about the article, with "unanswerable" if the article doesn\'t say, and with '
        '"yes" or "no" where that is asked. ' + _BRIEFLY + "\n\nQuestion: {input}",
        metric="qa_f1",
        max_new_tokens=128,
    ),
    "multifieldqa_en": Set(
        before="Read this text.",
        request="Answer this question about the text. " + _BRIEFLY + "\n\nQuestion: {input}",
        metric="qa_f1",
        max_new_tokens=64,
    ),
    "hotpotqa": _passages(32),
    "2wikimqa": _passages(32),
    "musique": _passages(32),
    "gov_report": _summary("Read this report of a government agency.", "Summarise the report in one page."),
    "qmsum": _summary(
        "Read this transcript of a meeting.",
        "Answer this request about the meeting in one or more sentences.\n\nRequest: {input}",
    ),
    "multi_news": _summary("Read these news articles.", "Summarise all of the articles together in one page."),
    "trec": Set(
        before="Say of each question what type it is, as in these examples.",
        request="{input}",
        metric="classification",
        max_new_tokens=64,
        first_line=True,
        chat=False,
    ),
    "triviaqa": Set(
        before="Answer the question about the passage, with the answer only, as in these examples.",
        request="{input}",
        metric="qa_f1",
        max_new_tokens=32,
        first_line=True,
        chat=False,
    ),
    "samsum": Set(
        before="Summarise the dialogue in a few short sentences, as in these examples.",
        request="{input}",
        metric="rouge_l",
        max_new_tokens=128,
        first_line=True,
        chat=False,
    ),
    "passage_count": Set(
        before="Some of these paragraphs are there more than once.",
        request="How many different paragraphs are there? Answer with the number, and nothing else.",
        metric="count",
        max_new_tokens=32,
    ),
    "passage_retrieval_en": Set(
        before="Read these numbered paragraphs from Wikipedia.",
        request="Which paragraph is this a summary of?\n\n{input}\n\n"
        'Answer with its number, such as "Paragraph 1", and nothing else.',
        metric="retrieval",
        max_new_tokens=32,
    ),
    "lcc": Set(
        before="Complete this code.", request="{input}", metric="edit_sim", max_new_tokens=64, chat=False
    ),
    "repobench-p": Set(
        before="Complete this code.", request="{input}", metric="edit_sim", max_new_tokens=64, chat=False
    ),
}  # fmt: skip
