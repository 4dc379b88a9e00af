"""Import models of icefall, and export models for it."""
