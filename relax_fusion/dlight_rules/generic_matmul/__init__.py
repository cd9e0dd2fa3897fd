"""Rules for functions that no pass of ours made."""
