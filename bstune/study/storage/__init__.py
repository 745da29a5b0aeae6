r"""A study in Optuna's storage: opened, asked for trials, told how they ended.

Connections and leases.

Any number of processes work on one study, by ``storage=URL``:

* **One owner.** A process renews a lease (:mod:`.lease`). A second owner is refused with the first
  one's name; a worker joins. One that gave no sign for ``search.lease_seconds`` loses its trials to
  others, and the same command takes its study over.
* **Each trial once.** It is stored with its index in one transaction; of two at an index the
  earlier one stays.
* **A worker** takes the study's arguments from the storage. It gives itself what differs by
  machine: ``data.root``, ``device``, ``output``, ``search.workers``. What it finds set otherwise is
  refused.
* **Seconds** are those of the owner's kind of device. Trials of another kind give their steps.
* **States** go to the owner's folder where a worker sees it under the same path. Else only a
  machine that has a trial's state continues it.
* **A storage that is away** is waited for, up to two minutes (:mod:`.patience`). A pooler has to
  let time-outs and keepalives pass (PgBouncer: ``ignore_startup_parameters = options``).

PostgreSQL serves several machines (``pip install psycopg2-binary``), SQLite the processes of one.
Many workers on few connections take Optuna's gRPC proxy, which has no password (``bstune[grpc]``)::

    python -c "import os; from optuna.storages import get_storage, run_grpc_proxy_server as run; \
               run(get_storage(os.environ['STUDIES']), host='0.0.0.0', port=13000)"
    bstune worker storage=grpc://host:13000 study=mine

On SLURM ``srun -n 8 bstune worker ...`` does, or submitit (``bstune[submitit]``)::

    executor = submitit.AutoExecutor("jobs")  # logs; cluster="local": on this machine
    executor.update_parameters(slurm_partition="gpu", gpus_per_node=1, timeout_min=600)
    worker = ["bstune", "worker", "storage=${oc.env:STUDIES}", "study=mine"]
    jobs = [executor.submit(subprocess.run, worker, check=True) for _ in range(8)]

and on Ray (``bstune[ray]``)::

    environment = {"env_vars": {"STUDIES": os.environ["STUDIES"]}}
    ray.init(address="auto", runtime_env=environment)
    ray.get([ray.remote(num_gpus=1)(subprocess.run).remote(worker, check=True) for _ in range(8)])

Whole studies, one a job, are Hydra's: ``bstune +workload=mine seed=0,1 'study=mine-${seed}'
hydra/launcher=submitit_slurm --multirun``, or ``joblib`` or ``ray``, whose packages are
hydra-submitit-launcher, hydra-joblib-launcher and hydra-ray-launcher (cloudpickle below 3). No
SLURM or Ray cluster was at hand: the tests start submitit's local executor and a Ray of one
machine.
"""
