"""The devices of a trial: their choice, several processes, memory that ran out, random states."""
