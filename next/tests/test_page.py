import re

from refusals import cases
from results import FAR, FEW_OCTAVES, STATES, STEP_TIMES, records, result

from bstune.report.answer import answer, header
from bstune.report.page import page

ATTACK = "</svg><script>alert(1)</script>"


@cases("""
state
switch
keep
'nothing reached: failed'
curve
""")
def test_the_page_has_the_answer_and_is_small(state):
    study = STATES[state]
    text = page(study, records(), "workload: digits\n")
    assert len(text) < 400_000
    plain = text.replace("&lt;", "<").replace("&gt;", ">").replace("&#39;", "'")
    assert header(study) in plain
    for row in answer(study):
        assert row.text in plain
    assert text.count("<svg") == 1


def test_all_trials_and_the_config_are_there():
    text = page(result(), records(), "workload: digits\nlr: {low: 0.01}\n")
    rows = re.findall(r"<tr><td>(\d+)</td>", text)
    assert [int(row) for row in rows] == list(range(18))
    assert "RuntimeError: shapes do not match (model.py:40)" in text
    assert "lr: {low: 0.01}" in text


def test_warnings_beyond_two_stand_on_the_page_alone():
    study = result(warnings=(STEP_TIMES, FEW_OCTAVES, FAR))
    assert FAR.fix not in " ".join(row.text for row in answer(study))
    text = page(study, records(), "")
    for warning in study.warnings:
        assert text.count(warning.fix) == 1


def test_nothing_is_run_or_loaded():
    study = result(workload=ATTACK, device=ATTACK, train_command=ATTACK, warnings=(STEP_TIMES,))
    trials = [record.model_copy(update={"message": ATTACK}) for record in records()]
    text = page(study, trials, ATTACK)
    # The page's own, whose digest the policy names, sorts the trials.
    assert text.count("<script") == 1
    assert text.index("<script") > text.rindex("alert")
    assert not re.findall(r"(?:src|href)=\"(?!#)", text)
    assert "default-src 'none'" in text


def test_many_trials_are_one_bitmap_that_the_page_may_show():
    many = [
        record.model_copy(update={"number": number, "lr": record.lr * (1 + number / 1000)})
        for number, record in enumerate(40 * records())
    ]
    text = page(result(), many, "")
    assert "data:image/png;base64," in text
    assert "img-src data:" in text
