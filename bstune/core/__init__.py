"""What everything is made of: records, questions, laws and clocks, without torch."""
