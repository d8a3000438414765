"""Repeated layers as one scanned body."""
