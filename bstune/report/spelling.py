"""How texts about a study write its options: as whoever ran the study takes them."""

from bstune.core.option_names import PythonTerms, in_hydra, in_python
from bstune.result import StudyResult


def with_options_as_called(result: StudyResult, text: str) -> str:
    """Write the options in a text as whoever ran the study sets them.

    They are arguments of ``bstune.Study`` for a study of Python objects, which no command composes
    again, and keys of ``hydra.sweeper`` for a sweep. The text of any other study stays as it is.
    """
    if not result.in_python:
        return text
    # An argument may hold more than its option: that of the target has the metric and a sign, too,
    # and that of the reference the batch size.
    sign = "<=" if result.mode == "min" else ">="
    terms = PythonTerms(result.metric, sign, round(result.reference.batch_size))
    # A sweep's study is one of Python objects, too.
    if result.in_hydra:
        return in_hydra(text, terms)
    return in_python(text, terms)
