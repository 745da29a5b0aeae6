"""What the hardware allows for a workload: memory ceiling, step times and roofline."""
