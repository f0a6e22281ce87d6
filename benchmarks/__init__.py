"""What Layertap costs and what it gains, each as a ratio of two things measured in turn on one machine."""
