"""Memory of one device."""
