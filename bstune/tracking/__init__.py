"""MLflow: an experiment of studies, one of their trials, and a view of their curves.

Only this package imports mlflow. Import its modules late: mlflow takes 1.0 s (3.17.2, Python 3.11,
two CPU cores, files cached, median of 8).

Studies are runs of the experiment ``mlflow.experiment`` (``bstune``), their trials of the one with
``-trials``; both carry the study's id as a tag. A study's run holds the answer as its note,
``gain/*``, ``critical_batch_size/*``, ``best/*``, ``curve/*`` over batch size as MLflow's step,
``test/*``, parameters, the files of its folder, the data set (its digest is of its settings) and
the winner's checkpoint, which loads into the module as any of Lightning's. Each study has a colour
of its own, out of ten. The view that a study's address opens is
:mod:`bstune.tracking.saved_view`'s.

Another tracker is a class with those methods of :class:`bstune.tracking.runs.Tracking` that
``study/`` calls, made where ``study/run.py`` calls ``open_tracking``.
"""
