"""How texts about a study write its options: as whoever ran the study takes them."""

from bstune.core.option_names import PythonTerms, in_python
from bstune.result import StudyResult


def with_options_as_called(result: StudyResult, text: str) -> str:
    """Write the options in a text as arguments of ``bstune.Study``, for a study of Python objects.

    No command composes such a study again. The text of any other study stays as it is.
    """
    if not result.in_python:
        return text
    # An argument may hold more than its option: that of the target has the metric and a sign, too,
    # and that of the reference the batch size.
    sign = "<=" if result.mode == "min" else ">="
    return in_python(text, PythonTerms(result.metric, sign, round(result.reference.batch_size)))
