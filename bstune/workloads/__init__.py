"""The workloads that ship: models and the Lightning module that trains them.

Each is named in ``conf/workload/``.
"""
