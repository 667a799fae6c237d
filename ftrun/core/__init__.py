"""Names, layouts and codecs shared by the launcher and the workers. Standard library only."""
