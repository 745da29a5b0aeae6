import json
from pathlib import Path

import pytest

import bstune

TUTORIAL = Path(bstune.__file__).parent / "tutorial.ipynb"


def test_the_tutorial_is_kept_without_outputs():
    cells = json.loads(TUTORIAL.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 8
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


def displayed(cell, kind):
    return [output["data"] for output in cell.outputs if output.output_type == kind]


@pytest.mark.slow  # a study in a kernel of its own
@pytest.mark.filterwarnings("ignore")
def test_the_tutorial_runs_and_shows_its_pictures(tmp_path):
    why = "needs pip install 'bstune[notebook]'"
    nbformat = pytest.importorskip("nbformat", reason=why)
    nbclient = pytest.importorskip("nbclient", reason=why)
    pytest.importorskip("ipykernel", reason=why)
    notebook = nbformat.read(TUTORIAL, as_version=4)
    in_folder = {"metadata": {"path": str(tmp_path)}}
    # An error of a cell is raised.
    client = nbclient.NotebookClient(
        notebook, timeout=250, kernel_name="python3", resources=in_folder
    )
    client.execute()
    cells = {cell.source: cell for cell in notebook.cells if cell.cell_type == "code"}

    (result,) = displayed(cells["result"], "execute_result")
    assert "data:image/png;base64," in result["text/html"]
    assert len(result["text/plain"]) < 150
    (picture,) = displayed(cells["result.plot()"], "execute_result")
    assert picture["image/png"].startswith("iVBOR")
    (plot,) = displayed(cells["optuna.visualization.plot_slice(result.study)"], "display_data")
    assert "application/vnd.plotly.v1+json" in plot

    (study,) = (cell for source, cell in cells.items() if "bstune.tune(" in source)
    shown = displayed(study, "display_data")
    live = [data for data in shown if data["text/plain"].startswith("best ")]
    assert len(live) == 1
    # The curve so far and the newest trials.
    assert live[0]["text/html"].count("<table") == 2
