"""Tables and figures, built from run records alone."""
