"""Numbers, durations and rows as text."""

from refusals import cases

from bstune.system import console


@cases("""
value | text
0.4 | '0.4'
12345 | 12,300
999.9 | 1,000
1230000.0 | '1.23e+06'
0 | '0'
""")
def test_number(value, text):
    assert console.number(value) == text


@cases("""
value | text
0.0331 | 33 ms
0.999 | 1 s
119 | 2 min
7640 | 2.1 h
7200000 | 2,000 h
""")
def test_seconds(value, text):
    assert console.seconds(value) == text


def test_a_long_path_stays_whole():
    path = "/home/me/" + "long-name/" * 10
    assert path in console.wrap("Page", f"see {path}", width=40).split()
