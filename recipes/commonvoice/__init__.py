"""Mozilla Common Voice, one language."""
