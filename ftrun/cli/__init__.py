"""The command line. Light on import: nothing here loads torch, rich, pydantic or pynvml before a command needs it."""
