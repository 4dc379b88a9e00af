"""Licences of data and models: what they demand, and the chain from data to an exported model."""
