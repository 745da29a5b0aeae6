"""A colour for each study, by which MLflow's pages tell their curves apart.

MLflow 3.17.2 colours a run by a hash of its id over a small palette, so that two of five studies
often look alike, unless the run has the tag ``mlflow.runColor``: its colour picker writes it, and
the charts and the table read it. A study's run gets it when it is made.
"""

from collections.abc import Sequence

# The store of run colours in mlflow/server/js/build takes it from the tags.
COLOUR_TAG = "mlflow.runColor"
# The six of Okabe and Ito that are seen on white and on black, in the order of bstune compare as
# far as it has them, then four more. For the common colour blindnesses (simulated by Machado et
# al. 2009) two of the ten are at least 13.9 apart in CIE Lab, where Okabe and Ito's own are 16.1.
PALETTE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#882255",
    "#785EF0",
    "#A6BE54",
    "#8C510A",
)


def next_colour(taken: Sequence[str]) -> str:
    """Choose a colour of the palette that no other study has, else the one given longest ago.

    Args:
        taken: the other studies' colours, the newest study's first. A user may have chosen colours
            that are not in the palette.
    """
    colours = [colour.upper() for colour in taken]
    for colour in PALETTE:
        if colour not in colours:
            return colour
    return max(PALETTE, key=colours.index)
