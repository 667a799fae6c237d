"""The parts of `ftrun status` about a run as a whole: its pace, its stalls, its protection."""
