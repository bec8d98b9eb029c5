"""Metrics of short answers: the last number, exact match and F1 as in SQuAD, and the letter of a multiple choice.

All scores except F1 are 0 or 100. Each function compares with one reference; `metrics.quality` takes the best score
over several references.
"""

import re
import string
from collections import Counter
from decimal import Decimal

UNANSWERABLE = "unanswerable"
"""The word for "no answer" in outputs and references, for texts without an answer (SQuAD 2)."""

# A minus directly after a digit is a subtraction, not a sign.
_NUMBER = re.compile(r"(?:(?<!\d)-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# A letter stands alone if no Latin letter and no digit is next to it: in "答案是B" it does, in "Bézier" it does not.
_LATIN = r"[0-9A-Za-z_À-ɏ]"
_LETTER = re.compile(rf"(?<!{_LATIN})[A-E](?!{_LATIN})")


def last_number(text: str) -> Decimal | None:
    """Returns the last number in `text`, without dollar signs and thousands separators, or `None`."""
    numbers = _NUMBER.findall(text.replace("$", "").replace("−", "-"))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def final_number(prediction: str, reference: str) -> list[float]:
    """Scores whether both texts end with the same number (GSM8K); "18", "$18.00" and "18." are equal.

    Raises:
        ValueError: the reference holds no number.
    """
    wanted = last_number(reference)
    if wanted is None:
        raise ValueError(f"reference {reference[:80]!r} holds no number, but final_number needs one: add it")
    return [100.0 * (last_number(prediction) == wanted)]


def normalise(text: str) -> str:
    """Returns the text in lower case without punctuation, articles and surplus spaces, as SQuAD does.

    Source: Rajpurkar et al. 2016.
    """
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def answer_exact_match(prediction: str, reference: str) -> list[float]:
    """Scores whether both texts are equal after `normalise`."""
    return [100.0 * (normalise(prediction) == normalise(reference))]


def answer_f1(prediction: str, reference: str) -> list[float]:
    """Returns the F1 score of the words of both texts after `normalise`.

    If a text is "unanswerable" or has no words, the score is 100 for equal texts and 0 for different texts.
    """
    ours, theirs = normalise(prediction), normalise(reference)
    if not ours or not theirs or UNANSWERABLE in (ours, theirs):
        return [100.0 * (ours == theirs)]
    said, wanted = ours.split(), theirs.split()
    common = sum((Counter(said) & Counter(wanted)).values())
    return [200.0 * common / (len(said) + len(wanted))]


def choice(prediction: str, reference: str) -> list[float]:
    """Scores whether the first letter from A to E that stands alone in the prediction is the reference.

    Examples of such letters: "B", "(B)", "B. Berlin", "答案是B".
    """
    letter = _LETTER.search(prediction)
    return [100.0 * (letter is not None and letter[0] == reference.strip())]
