"""What MLC-LLM's command line finds out about its arguments."""
