"""What an analysis says of points that may be better than the winner."""

import pytest
from toolbox import make_result

from bstune.result import NotRunAgain
from bstune.study.analysis.analyse import point_not_run_again
from bstune.study.planning.replicates import Winner

BEYOND_LIMIT = Winner(make_result(number=3, batch_size=32, lr=0.1), steps=80.0)
PASSED_OVER = Winner(make_result(number=5, batch_size=64, lr=0.2), steps=70.0)


@pytest.mark.parametrize(
    ("beyond_limit", "passed_over", "expected"),
    [
        (None, None, None),
        (BEYOND_LIMIT, None, NotRunAgain(batch_size=32, lr=0.1, candidates=2)),
        (None, PASSED_OVER, NotRunAgain(batch_size=64, lr=0.2, candidates=None)),
        # The one that there was no time for is named first.
        (BEYOND_LIMIT, PASSED_OVER, NotRunAgain(batch_size=64, lr=0.2, candidates=None)),
    ],
)
def test_a_point_without_fresh_seeds_is_named_with_what_kept_them(
    beyond_limit, passed_over, expected
):
    assert point_not_run_again(beyond_limit, passed_over, max_candidates=2) == expected
