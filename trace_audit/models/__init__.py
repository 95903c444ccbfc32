"""Model definitions come from transformers; what is here finds, checks and loads them."""
