"""Recursions over the lattice: sums of paths, and occupancies."""
