"""Models and runs of other toolkits."""
