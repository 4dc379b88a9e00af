"""Import models of other toolkits, and export models for them."""
