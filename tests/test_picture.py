import pickle
import struct
import subprocess
import sys

from matplotlib.figure import Figure

from bstune.report.drawing import figure_of


def drawn(inches=(4.0, 3.0), dots_per_inch=50):
    return figure_of(lambda figure: figure.subplots().plot([1, 2], [2, 1]), inches, dots_per_inch)


def pixels(png):
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


def test_a_picture_is_a_figure_and_its_png_has_its_pixels(tmp_path):
    picture = drawn()
    canvas = picture.canvas
    assert isinstance(picture, Figure)
    assert pixels(picture._repr_png_()) == (200, 150)
    assert picture.canvas is canvas
    # Once more after it was saved with another resolution.
    picture.savefig(tmp_path / "large.png", dpi=100)
    assert pixels((tmp_path / "large.png").read_bytes()) == (400, 300)
    assert pixels(picture._repr_png_()) == (200, 150)


def test_a_picture_that_was_sent_is_the_same():
    picture = drawn()
    sent = pickle.loads(pickle.dumps(picture))  # noqa: S301
    assert sent._repr_png_() == picture._repr_png_()


def test_a_picture_needs_no_pyplot_and_changes_no_setting():
    code = """
import matplotlib, sys
before = matplotlib.rcParams.copy()
from bstune.report.drawing import figure_of
figure_of(lambda figure: figure.subplots(), (2.0, 2.0))._repr_png_()
assert dict.__eq__(before, matplotlib.rcParams)
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
