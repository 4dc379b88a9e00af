"""Models and runs of icefall: import and export."""
