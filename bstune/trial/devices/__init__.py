"""What a trial runs on: the device, several processes, memory that ran out, random states."""
