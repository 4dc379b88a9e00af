"""LibriSpeech: a thousand hours of English audio books."""
