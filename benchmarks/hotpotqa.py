"""HotpotQA as JSON lines for ``kvec eval --data``: ``python -m benchmarks.hotpotqa FILE > hotpotqa_short.jsonl``.

FILE has the dev set's questions, one JSON object a line, with ``gold_paragraphs`` and ``distractors`` (lists of titles
and texts), as in the data of https://github.com/nyu-mll/quality; .gz too.
"""

import gzip
import json
import random
import sys

_REQUEST = "Answer with as few words as you can, and nothing else.\n\nQuestion: "


def main() -> None:
    """Writes an object for each question, its paragraphs in random order."""
    path = sys.argv[1]
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file):
            row = json.loads(line)
            paragraphs = row["gold_paragraphs"] + row["distractors"]
            random.Random(number).shuffle(paragraphs)
            context = "\n\n".join(f"{each['title']}: {each['text']}" for each in paragraphs)
            print(json.dumps({"context": context, "question": _REQUEST + row["question"], "answers": [row["answer"]]}))


if __name__ == "__main__":
    main()
