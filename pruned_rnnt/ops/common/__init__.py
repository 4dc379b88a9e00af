"""Library of ops, geometry of rows, and products that every room of ops shares."""
