"""A Python call and the user's entries: arrays with the shardings that were asked for."""
