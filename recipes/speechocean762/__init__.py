"""English sentences read by adults and children whose first language is Mandarin."""
