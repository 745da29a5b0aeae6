"""MLflow: an experiment of studies, one of their trials, and a view of their curves.

Only this package imports mlflow. Import its modules late: mlflow takes 1.0 s (3.17.2, Python 3.11,
two CPU cores, files cached, median of 8).

Studies are runs of the experiment ``mlflow.experiment`` (``bstune``). Their trials are runs of the
experiment with ``-trials`` behind that name. Both carry the study's id as a tag. A study's run
holds:

* the answer as its note, and parameters;
* metrics: ``gain/*``, ``critical_batch_size/*``, ``best/*`` and ``test/*``, and ``curve/*``, in
  which MLflow's step is the batch size;
* the files of the study's folder, and the data set, whose digest is of its settings;
* the winner's checkpoint, which loads into the module as any of Lightning's.

Each study has a colour of its own, out of ten. A study's address opens the view that
:mod:`bstune.tracking.saved_view` makes.

Another tracker is a class with those methods of :class:`bstune.tracking.runs.Tracking` that
``study/`` calls, made where ``study/run.py`` calls ``open_tracking``.
"""
