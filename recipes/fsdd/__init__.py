"""Connected digits from the Free Spoken Digit Dataset: real speech of a few speakers."""
