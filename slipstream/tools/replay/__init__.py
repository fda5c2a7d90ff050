"""What drafting would have gained on texts that were written before: a log, through drafters."""
