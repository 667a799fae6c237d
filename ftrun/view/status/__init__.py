"""What `ftrun status` says of a run as a whole: how fast it steps, what it waits for, whether it is protected."""
