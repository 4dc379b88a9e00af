"""The training loop and all that it saves, whatever it trains."""
