"""What is trained: functions that build module, data and Trainer arguments for a trial."""
