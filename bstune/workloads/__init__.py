"""The workloads that ship, as plain Lightning; conf/workload/ names each."""
