"""The decode engine: scheduling, paged KV, trace replay, sampling and statistics."""
