"""Import parts of NVIDIA NeMo's transducers, and export parts for them."""
