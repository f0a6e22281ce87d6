"""Workers and the models they registered."""
