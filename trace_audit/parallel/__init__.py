"""Ranks: how they talk, how a model is split among them."""
