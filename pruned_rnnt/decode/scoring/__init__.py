"""Error rates and result files."""
