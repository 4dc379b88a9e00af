"""Data recipes: one folder a corpus, each with a prepare module and its README."""
