"""Find, load, publish and describe trained models of every kind."""
