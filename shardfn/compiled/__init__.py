"""What XLA produced: ahead-of-time compilation, the HLO reader, and the comparison with a prediction."""
