"""How options are written in what is said of a study: as whoever ran it takes them."""

from bstune.core.option_names import PythonTerms, in_python
from bstune.result import StudyResult


def spelled(result: StudyResult, text: str) -> str:
    """Write a text's options as arguments, where Python objects gave the study: no command composes it again."""
    if not result.in_python:
        return text
    sign = "<=" if result.mode == "min" else ">="
    return in_python(text, PythonTerms(result.metric, sign, round(result.reference.batch_size)))
