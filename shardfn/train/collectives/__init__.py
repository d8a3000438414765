"""Communication of gradients and parameters: buckets, fused collectives, traffic."""
