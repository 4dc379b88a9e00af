"""When words are spoken, and how sure the model is of them."""
