"""Training steps: gradients, update, shardings, and what was asked for."""
