"""What a workload may expect of a machine: memory, step times and the roofline."""
