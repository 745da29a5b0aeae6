"""MLflow: an experiment of studies, one of their trials, and a view of their curves.

Only this package imports mlflow. Import its modules late: mlflow takes 1.0 s (3.17.2, Python 3.11,
two CPU cores, files cached, median of 8).
"""
