"""Corpora to prepared folders."""
