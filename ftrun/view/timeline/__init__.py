"""One incident drawn as the figures of the design draw it, and the whole run as a trace."""
