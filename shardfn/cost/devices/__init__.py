"""Devices and their figures: chips, links, hardware targets, calibration."""
