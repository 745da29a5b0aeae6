"""What a trial runs on: the device, several processes of one trial, memory that ran out, random states."""
