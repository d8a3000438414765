"""What XLA's CPU, GPU and TPU backends do to a partitioned program."""
